"""The copy plan: recorded from an engine model's own loader, complete or refused with the names, replayed in place."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from colocate_rl.engine.weights import CopyPlan, CopyRecorder, check_consumption, check_names
from colocate_rl.errors import WeightSyncError

pytestmark = pytest.mark.unit

HIDDEN, HEADS, VOCAB, PADDED = 4, 6, 5, 8
Weights = dict[str, torch.Tensor]


class FusedModel(nn.Module):
    """What an engine makes of a checkpoint: q, k and v in one tensor, an embedding with padded rows, a cast norm."""

    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.full((3 * HEADS, HIDDEN), 7.0, dtype=dtype))
        self.embed = nn.Parameter(torch.full((PADDED, HIDDEN), 7.0, dtype=dtype))
        self.norm = nn.Parameter(torch.full((HIDDEN,), 7.0, dtype=dtype))
        self.head = self.embed if tied else nn.Parameter(torch.full((VOCAB, HIDDEN), 7.0, dtype=dtype))

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name in ("q", "k", "v"):
            place = "qkv".index(name)
            self.qkv.data.narrow(0, place * HEADS, HEADS).copy_(tensor)
        elif name == "embed":
            self.embed.data[:VOCAB].copy_(tensor)
            self.embed.data[VOCAB:].zero_()
        elif name == "norm":
            self.norm.data.copy_(tensor)
        elif name == "head":
            self.head.data.copy_(tensor)


class ShardedModel(FusedModel):
    """The second of two shards: it reads the second half of each of q, k and v."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name in ("q", "k", "v"):
            place = "qkv".index(name)
            self.qkv.data.narrow(0, place * HEADS, HEADS).copy_(tensor.narrow(0, HEADS, HEADS))
        else:
            super().load(name, tensor)


class TransposedModel(FusedModel):
    """Keeps the norm's neighbour in another order: a strided view of the policy's tensor."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "q":
            self.qkv.data.narrow(0, 0, HEADS).copy_(tensor.t())
        else:
            super().load(name, tensor)


def policy_weights(seed: int = 0, **changes: torch.Tensor | None) -> Weights:
    torch.manual_seed(seed)
    weights: dict[str, torch.Tensor | None] = {
        "embed": torch.randn(VOCAB, HIDDEN),
        "q": torch.randn(HEADS, HIDDEN),
        "k": torch.randn(HEADS, HIDDEN),
        "v": torch.randn(HEADS, HIDDEN),
        "norm": torch.randn(HIDDEN),
        **changes,
    }
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


def record(model: FusedModel, weights: Weights) -> CopyPlan:
    return CopyPlan.record(model.load_weights, weights, dict(model.named_parameters()))


def check_filled(model: FusedModel, weights: Weights) -> None:
    dtype = model.qkv.dtype
    fused = torch.cat([weights["q"], weights["k"], weights["v"]]).to(dtype)
    assert torch.equal(model.qkv.data, fused)
    assert torch.equal(model.embed.data[:VOCAB], weights["embed"].to(dtype))
    assert model.embed.data[VOCAB:].abs().sum() == 0
    assert torch.equal(model.norm.data, weights["norm"].to(dtype))


# Complete plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recording_fills_the_engine_and_replaying_writes_the_same_storage(dtype: torch.dtype) -> None:
    model = FusedModel(dtype)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    weights = policy_weights()
    plan = record(model, weights)
    check_filled(model, weights)
    assert sorted(copy.source for copy in plan.copies) == ["embed", "k", "norm", "q", "v"]

    for tensor in weights.values():  # an optimizer step changes values in place
        tensor.add_(1.5)
    plan.apply(weights)
    check_filled(model, weights)

    moved = policy_weights(seed=1)  # other storage, as after a resume
    plan.apply(moved)
    check_filled(model, moved)
    weights["norm"].zero_()
    plan.apply(weights)
    check_filled(model, weights)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_replaying_runs_no_loader_and_leaves_the_policy_alone() -> None:
    model = FusedModel()
    calls: list[int] = []

    def load(weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        calls.append(len(weights))
        model.load_weights(weights)

    weights = policy_weights()
    plan = CopyPlan.record(load, weights, dict(model.named_parameters()))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    plan.apply(weights)
    assert calls == [5]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())


def test_parameters_that_require_grad_are_fine() -> None:
    """The policy sends its live parameters; no graph may come of it."""
    model = FusedModel()
    weights = {name: nn.Parameter(tensor) for name, tensor in policy_weights().items()}
    plan = CopyPlan.record(model.load_weights, weights, dict(model.named_parameters()))
    plan.apply(weights)
    check_filled(model, {name: tensor.detach() for name, tensor in weights.items()})
    assert all(parameter.grad_fn is None for parameter in model.parameters())


def test_a_slice_of_a_policy_tensor() -> None:
    """A tensor-parallel shard reads only its rows; each sync must read the same ones."""
    model = ShardedModel()
    double = {name: torch.randn(2 * HEADS, HIDDEN) for name in "qkv"}
    weights = policy_weights(**double)
    plan = record(model, weights)
    for tensor in weights.values():
        tensor.mul_(-2.0)
    plan.apply(weights)
    expected = torch.cat([weights[name][HEADS:] for name in "qkv"])
    assert torch.equal(model.qkv.data, expected)


def test_a_transposed_policy_tensor_and_one_inside_a_larger_storage() -> None:
    model = TransposedModel()
    flat = torch.randn(100)
    weights = policy_weights(q=torch.randn(HIDDEN, HEADS), norm=flat[40 : 40 + HIDDEN])
    plan = record(model, weights)
    weights["q"].add_(1.0)
    flat.mul_(3.0)
    plan.apply(weights)
    assert torch.equal(model.qkv.data[:HEADS], weights["q"].t())
    assert torch.equal(model.norm.data, flat[40 : 40 + HIDDEN])


def test_an_untied_head_is_a_parameter_of_its_own() -> None:
    model = FusedModel(tied=False)
    weights = policy_weights(head=torch.randn(VOCAB, HIDDEN))
    plan = record(model, weights)
    weights["head"].neg_()
    plan.apply(weights)
    assert torch.equal(model.head.data, weights["head"])


# Refused, with the name


@pytest.mark.parametrize(("gone", "parameter"), [("k", "qkv"), ("norm", "norm"), ("embed", "embed")])
def test_a_parameter_that_is_not_filled(gone: str, parameter: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        record(FusedModel(), policy_weights(**{gone: None}))
    assert f"1 engine parameter(s) would not be filled exactly once by the policy's tensors: {parameter}." in str(
        caught.value
    )


class LeavesPadding(FusedModel):
    """Forgets the padded rows of the embedding."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            self.embed.data[:VOCAB].copy_(tensor)
        else:
            super().load(name, tensor)


class LoadsTwice(FusedModel):
    """Writes one row of v a second time."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "v":
            self.qkv.data[-1].copy_(tensor[-1])


class Overlaps(FusedModel):
    """Clears the whole fused tensor after k has been copied."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor)
        if name == "k":
            self.qkv.data.narrow(0, HEADS, HEADS).fill_(0.0)


@pytest.mark.parametrize(
    ("model", "parameter"), [(LeavesPadding(), "embed"), (LoadsTwice(), "qkv"), (Overlaps(), "qkv")]
)
def test_elements_written_never_or_twice(model: FusedModel, parameter: str) -> None:
    with pytest.raises(WeightSyncError, match=rf"exactly once .*: {parameter}\.$"):
        record(model, policy_weights())


class Computes(FusedModel):
    """Stores something other than the policy's values."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(tensor + 1.0)
        else:
            super().load(name, tensor)


class Broadcasts(FusedModel):
    """Spreads one number over a whole parameter."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(tensor[:1])
        else:
            super().load(name, tensor)


@pytest.mark.parametrize("model", [Computes(), Broadcasts()])
def test_a_computed_parameter_cannot_be_replayed(model: FusedModel) -> None:
    with pytest.raises(WeightSyncError, match=r"computed from the checkpoint, not copied: norm\."):
        record(model, policy_weights())


def test_a_policy_tensor_that_goes_nowhere() -> None:
    weights = policy_weights(score=torch.randn(3), adapter=torch.randn(2))
    with pytest.raises(WeightSyncError, match=r"no value from these policy tensors: adapter, score\."):
        record(FusedModel(), weights)


def test_several_problems_are_named_together() -> None:
    with pytest.raises(WeightSyncError, match=r"2 engine parameter\(s\) .*: norm, qkv\."):
        record(FusedModel(), policy_weights(q=None, norm=None))


def test_writes_to_other_tensors_are_no_part_of_the_plan() -> None:
    """Loaders keep scratch buffers; only parameters are replayed."""
    model = FusedModel()
    scratch = torch.zeros(HIDDEN)

    def load(weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)
        scratch.copy_(dict(weights)["norm"])
        scratch.copy_(torch.ones(HIDDEN))

    weights = policy_weights()
    plan = CopyPlan.record(load, weights, dict(model.named_parameters()))
    plan.apply(weights)
    assert torch.equal(scratch, torch.ones(HIDDEN))
    assert len(plan.copies) == 5


# A loader that repacks


def consumed(weights: Weights, reads: Sequence[tuple[str, Any]]) -> CopyRecorder:
    """A recorder that saw the given parts of the given tensors being copied somewhere."""
    recorder = CopyRecorder(weights)
    with recorder:
        for name, part in reads:
            view = weights[name][part]
            torch.empty_like(view).copy_(view)
    return recorder


EVERYTHING = [(name, slice(None)) for name in ("embed", "q", "k", "v", "norm")]


def test_everything_read_is_complete_also_when_read_twice() -> None:
    weights = policy_weights()
    check_consumption(consumed(weights, EVERYTHING), weights, 1)
    check_consumption(consumed(weights, [*EVERYTHING, ("q", slice(None))]), weights, 1)
    halves = [("q", slice(3)), ("q", slice(3, None))]
    rest = [read for read in EVERYTHING if read[0] != "q"]
    check_consumption(consumed(weights, [*rest, *halves]), weights, 1)


def test_a_tensor_read_in_part_or_not_at_all() -> None:
    weights = policy_weights()
    reads = [("embed", slice(None)), ("q", slice(3)), ("k", slice(None)), ("v", slice(None))]
    with pytest.raises(WeightSyncError, match=r"completely: norm, q\."):
        check_consumption(consumed(weights, reads), weights, 1)


def test_a_shard_reads_its_part() -> None:
    weights = policy_weights()
    halves = [*EVERYTHING[:1], *((name, slice(3)) for name in "qkv"), EVERYTHING[4]]
    check_consumption(consumed(weights, halves), weights, 2)
    with pytest.raises(WeightSyncError, match="completely: k, q, v"):
        check_consumption(consumed(weights, halves), weights, 1)


# A part


def test_a_part_is_copied_where_the_whole_would_be_and_nowhere_else() -> None:
    weights, model = policy_weights(), FusedModel(torch.bfloat16)
    plan = CopyPlan.record(model.load_weights, weights, dict(model.named_parameters()))
    kept = {name: tensor.clone() for name, tensor in model.named_parameters()}
    merged = torch.randn(2 * HEADS, HIDDEN)[HEADS:]  # another type, storage and offset than the recorded tensor
    plan.apply_part("k", merged)
    assert torch.equal(model.qkv[HEADS : 2 * HEADS], merged.bfloat16())
    kept["qkv"][HEADS : 2 * HEADS] = merged.bfloat16()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.named_parameters())
    with pytest.raises(WeightSyncError, match="no tensor lora_A"):
        plan.apply_part("lora_A", merged)


# Names


EXPECTED = {"a": torch.Size([2, 3]), "b": torch.Size([4])}


def named(**shapes: tuple[int, ...]) -> Weights:
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def test_names_that_fit() -> None:
    check_names(named(a=(2, 3), b=(4,)), EXPECTED)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (named(a=(2, 3)), ["missing: b"]),
        (named(a=(2, 3), c=(4,)), ["missing: b", "unknown to the engine's architecture: c"]),
        (named(a=(2, 3), b=(4,), lora=(1,)), ["unknown to the engine's architecture: lora"]),
        (named(a=(3, 2), b=(4,)), ["a is (3, 2), expected (2, 3)"]),
        (named(a=(0,), b=(4,)), ["a is (0,), expected (2, 3)"]),
        ({}, ["missing: a, b"]),
    ],
    ids=["dropped", "renamed", "added", "transposed", "empty", "none"],
)
def test_names_that_do_not_fit(weights: Weights, words: list[str]) -> None:
    with pytest.raises(WeightSyncError) as caught:
        check_names(weights, EXPECTED)
    for word in words:
        assert word in str(caught.value)
    assert ("missing" in str(caught.value)) == any("missing" in word for word in words)
    assert ("unknown" in str(caught.value)) == any("unknown" in word for word in words)
