"""Rows without padding against rows with it: values, gradients, grouping, and which models keep their padding."""

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251 (a real DistributedDataParallel needs a group)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from colocate_rl import GRPOConfig, speedups
from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention, packing, selfcheck
from colocate_rl.training.aggregation import AGGREGATIONS
from colocate_rl.training.logprobs import TokenStatistics, completion_statistics
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.objective import Objective
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.unit

VOCAB = 288
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RAGGED = ((1, 1), (2, 1), (3, 0), (20, 40), (1, 9))
ROWS = {"ragged": RAGGED, "one row": ((3, 7),), "one token each": ((1, 1), (4, 1)), "empty first": ((2, 0), (2, 1))}


def make_batch(*lengths: tuple[int, int], seed: int = 0) -> RolloutBatch:
    """Random rows of (prompt length, completion length)."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(VOCAB, (length,), generator=generator).tolist()
        return drawn

    completions = [Completion(ids(length), [-5.6] * length, "stop") for _, length in lengths]
    return RolloutBatch.from_rows(
        [ids(prompt) for prompt, _ in lengths],
        completions,
        torch.randn(len(lengths), generator=generator),
        keep=[number != 1 for number in range(len(lengths))],
        pad_token_id=7,
    )


def make_model(config: PretrainedConfig | None = None, **changes: Any) -> PreTrainedModel:
    """Weights so large that attention decides what comes next."""
    if config is None:
        model = tiny_model(**changes)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.mul_(6.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    attention.install(model)
    return model


def statistics(
    model: nn.Module, batch: RolloutBatch, *, packed: bool, wrapper: nn.Module | None = None
) -> TokenStatistics:
    return completion_statistics(
        wrapper or model,
        model,
        batch,
        temperature=0.8,
        chunk=16,
        autocast=contextlib.nullcontext,
        packed=packed,
    )


def gradients(model: nn.Module, found: TokenStatistics) -> dict[str, torch.Tensor]:
    """Of a loss in which every token weighs something else."""
    weights = torch.randn(found.logprobs.shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (found.logprobs * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_gradients(
    mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-4
) -> None:
    assert mine.keys() == other.keys()
    for name, gradient in other.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            mine[name], gradient, rtol=tolerance, atol=tolerance * max(scale, 1e-6), msg=lambda m, n=name: f"{n}: {m}"
        )


def check_against_padded(
    model: PreTrainedModel, batch: RolloutBatch, wrapper: nn.Module | None = None, tolerance: float = 1e-5
) -> None:
    padded = statistics(model, batch, packed=False)
    expected = gradients(model, padded)
    packed = statistics(model, batch, packed=True, wrapper=wrapper)
    torch.testing.assert_close(packed.logprobs, padded.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.entropy, padded.entropy, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, packed), expected, tolerance)
    if bool(batch.completion_mask.any()):
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0


# Values and gradients


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_equal_to_padded_rows(tied: bool, kv_heads: int, rows: str) -> None:
    model = make_model(tied=tied, num_key_value_heads=kv_heads)
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    check_against_padded(model, make_batch(*ROWS[rows]))


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL, head_dim=8)], ids=["llama", "qwen3"])
def test_equal_to_padded_rows_in_other_models(config: PretrainedConfig) -> None:
    check_against_padded(make_model(config), make_batch(*RAGGED))


SHARED = {
    "groups": ((0, 5, 3), (0, 5, 9), (1, 7, 2), (0, 5, 1), (1, 7, 6)),
    "one prompt": ((0, 12, 1), (0, 12, 4), (0, 12, 2)),
    "an owner without completion": ((0, 6, 0), (0, 6, 3), (1, 2, 5)),
    "borrowers without completion": ((0, 6, 2), (0, 6, 0), (1, 2, 5), (0, 6, 0)),
    "a prompt that starts another": ((0, 6, 2), (2, 3, 4), (0, 6, 3), (2, 3, 1)),
}
"""(prompt, its length, completion length) of each row."""


def shared_batch(*rows: tuple[int, int, int]) -> RolloutBatch:
    batch = make_batch(*((length, tokens) for _, length, tokens in rows))
    for row, (prompt, length, _) in enumerate(rows):
        generator = torch.Generator().manual_seed(prompt if prompt != 2 else 0)
        batch.input_ids[row, :length] = torch.randint(VOCAB, (length,), generator=generator)
    return batch


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("rows", SHARED)
def test_shared_prompts_are_computed_once_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, rows: str, kernel: bool
) -> None:
    if kernel:
        monkeypatch.setattr(attention, "varlen_attn", kernel_on_cpu)
        monkeypatch.setattr(attention, "_kernel_takes", lambda *_: True)
    batch = shared_batch(*SHARED[rows])
    packed = packing.PackedRows.of(batch)
    prompts = {prompt: length for prompt, length, _ in SHARED[rows]}
    assert packed.input_ids.shape[1] == sum(prompts.values()) + int(batch.completion_mask.sum())
    assert packed.keys is not None
    check_against_padded(make_model(), batch, tolerance=1e-4)  # prompts sum their gradients in another order


def test_tokens_between_completion_tokens_stay_with_their_row() -> None:
    """A tool's answer is not sampled, but it is no part of the prompt either."""
    batch = shared_batch((0, 5, 6), (0, 5, 8))
    batch.completion_mask[:, 7:9] = False
    batch.loss_mask[:, 7:9] = False
    assert packing.PackedRows.of(batch).input_ids.shape[1] == 5 + 6 + 8
    check_against_padded(make_model(), batch)


def test_a_short_prompt_is_not_worth_gathering_keys() -> None:
    assert packing.PackedRows.of(shared_batch((0, 1, 40), (0, 1, 50))).keys is None


def test_shared_prompts_under_gradient_checkpointing() -> None:
    model, batch = make_model(), shared_batch(*SHARED["groups"])
    model.train()
    expected = gradients(model, statistics(model, batch, packed=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(gradients(model, statistics(model, batch, packed=True)), expected)


def test_equal_to_padded_rows_where_tools_wrote_in_between() -> None:
    batch = make_batch(*RAGGED)
    spoken = batch.completion_mask & (torch.arange(batch.input_ids.shape[1]) % 5 < 3)
    assert bool((spoken != batch.completion_mask).any())
    holes = replace(batch, completion_mask=spoken, loss_mask=spoken)
    check_against_padded(make_model(), holes)
    found = statistics(make_model(), holes, packed=True).logprobs
    assert torch.equal(found != 0, spoken)


def test_no_completion_at_all() -> None:
    """No error and a backward pass that every rank can take part in."""
    model = make_model()
    found = statistics(model, make_batch((3, 0), (2, 0)), packed=True)
    assert found.logprobs.abs().sum() == 0
    moved = gradients(model, found)
    assert moved.keys() == {name for name, _ in model.named_parameters()}
    assert all(float(gradient.abs().max()) == 0 for gradient in moved.values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_calls_the_same_attention_again(reentrant: bool) -> None:
    model, batch = make_model(), make_batch(*RAGGED)
    model.train()
    expected = gradients(model, statistics(model, batch, packed=False))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same_gradients(gradients(model, statistics(model, batch, packed=True)), expected)


def test_mixed_precision() -> None:
    model, batch = make_model(), make_batch(*RAGGED)
    both = [
        completion_statistics(
            model,
            model,
            batch,
            temperature=1.0,
            chunk=16,
            autocast=lambda: torch.autocast("cpu", torch.bfloat16),
            packed=packed,
        ).logprobs
        for packed in (False, True)
    ]
    assert float((both[0] - both[1]).detach().abs().max()) < 0.1


def kernel_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    **_: bool,
) -> torch.Tensor:
    """What torch's varlen_attn promises, tokens first, by a mask of N x M: queries are the last tokens of their row."""
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    row, key_row = (
        torch.bucketize(torch.arange(states.shape[0]), starts, right=True) - 1
        for states, starts in ((query, cu_seq_q), (key, cu_seq_k))
    )
    allowed = row[:, None] == key_row[None, :]
    if window_size[1] == 0:  # counted from the end of the row
        to_end = cu_seq_q[row + 1] - torch.arange(query.shape[0])
        key_to_end = cu_seq_k[key_row + 1] - torch.arange(key.shape[0])
        allowed &= key_to_end[None, :] >= to_end[:, None]
    first = [states.transpose(0, 1)[None] for states in (query, key, value)]
    output = nn.functional.scaled_dot_product_attention(*first, attn_mask=allowed, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("grouped", [{}, {"enable_gqa": True}], ids=["torch 2.11", "torch 2.13"])
def test_the_kernel_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch, grouped: dict[str, bool]) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel_on_cpu)
    monkeypatch.setattr(attention, "_GROUPED", grouped)
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_: True)
    check_against_padded(make_model(num_key_value_heads=1), make_batch(*RAGGED))


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_through_distributed_data_parallel() -> None:
    model = make_model()
    check_against_padded(model, make_batch(*RAGGED), nn.parallel.DistributedDataParallel(model))


# What else the model does stays as it was


def test_other_passes_are_bit_for_bit_as_before() -> None:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (3, 12))
    padded_left = torch.ones_like(ids)
    padded_left[0, :5] = 0
    plain, changed = tiny_model(), tiny_model()
    attention.install(changed)
    for arguments in ({}, {"attention_mask": padded_left}, {"attention_mask": torch.ones_like(ids)}):
        with torch.no_grad():
            assert torch.equal(plain(input_ids=ids, **arguments).logits, changed(input_ids=ids, **arguments).logits)
    both = [
        model.generate(ids, attention_mask=padded_left, max_new_tokens=5, do_sample=False) for model in (plain, changed)
    ]
    assert torch.equal(*both)


def test_nothing_of_it_is_saved(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()


def test_no_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()

    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask of N x N")

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention.NAME, build)
    statistics(model, make_batch(*RAGGED), packed=True)
    with pytest.raises(AssertionError, match="a mask of N x N"):
        statistics(model, make_batch(*RAGGED), packed=False)


def test_a_model_without_it_is_not_given_packed_rows() -> None:
    with pytest.raises(AssertionError, match="sdpa"):
        statistics(tiny_model(), make_batch(*RAGGED), packed=True)


# Packing


def test_packed_rows() -> None:
    batch = make_batch((2, 2), (1, 0), (2, 1))
    rows = packing.PackedRows.of(batch)
    expected = [*batch.input_ids[0, :4].tolist(), batch.input_ids[1, 0].item(), *batch.input_ids[2, :3].tolist()]
    assert rows.input_ids.tolist() == [expected]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2]]
    assert rows.starts.tolist() == [0, 4, 5, 8]
    assert rows.starts.dtype == torch.int32
    assert rows.longest == 4
    assert rows.predictors.tolist() == [1, 2, 6]
    assert rows.keys is None


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(1, 120),
    st.booleans(),
)
def test_groups_hold_every_row_once_and_no_more_than_allowed(lengths: list[int], limit: int, padded: bool) -> None:
    groups = packing.fill(lengths, limit, padded=padded)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        taken = [lengths[row] for row in group]
        tokens = max(taken) * len(taken) if padded else sum(taken)
        assert tokens <= limit or len(group) == 1
        assert group == sorted(group)
    if not padded and max(lengths, default=0) <= limit:
        # No two groups could be one: the first-fit rule wastes less than half of the room.
        totals = sorted(sum(lengths[row] for row in group) for group in groups)
        assert len(totals) < 2 or totals[0] + totals[1] > limit


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=40),
    st.lists(st.integers(1, 20), min_size=5, max_size=5),
    st.integers(1, 120),
)
def test_groups_count_a_shared_prompt_once(rows: list[tuple[int, int]], prompts: list[int], limit: int) -> None:
    lengths = [prompts[key] + tokens for key, tokens in rows]
    groups = packing.fill(lengths, limit, padded=False, prompts=[(key, prompts[key]) for key, _ in rows])
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    for group in groups:
        tokens = sum(rows[row][1] for row in group) + sum(prompts[key] for key in {rows[row][0] for row in group})
        assert tokens <= limit or len(group) == 1


def test_rows_of_a_prompt_are_kept_together() -> None:
    prompts = [(row % 4, 10) for row in range(16)]
    groups = packing.fill([12] * 16, 18, padded=False, prompts=prompts)
    assert [{row % 4 for row in group} for group in groups] == [{0}, {1}, {2}, {3}]


# Micro-batches of a slice


def objective(loss_type: str = "dapo", **changes: Any) -> Objective:
    values: dict[str, Any] = {
        "settings": LossSettings(loss_type=loss_type, max_completion_length=40, correction_clip_max=None),
        "temperature": 1.0,
        "chunk": 16,
        "autocast": contextlib.nullcontext,
    }
    return Objective(**{**values, **changes})


class Early:
    """Stands for the trainer: backward passes before the last one."""

    def __init__(self) -> None:
        self.passes = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Callable[[torch.Tensor], None]]:
        self.passes += 1
        yield lambda loss: loss.backward()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_micro_batches_add_up_to_their_slice(loss_type: str, level: str, packed: bool) -> None:
    """Loss, log-probabilities and every gradient, for each loss; also with rows left out of the loss."""
    model, batch = make_model(), make_batch(*RAGGED, (4, 12), (9, 3))
    live = statistics(model, batch, packed=False).logprobs.detach()
    old = live + 0.3 * torch.randn(live.shape, generator=torch.Generator().manual_seed(2)) * batch.completion_mask
    batch = batch.with_logprobs(old_logprobs=old, ref_logprobs=old + 0.1)
    whole = objective(loss_type)
    whole = replace(whole, settings=replace(whole.settings, importance_sampling_level=level, beta=0.1))
    loss, logprobs = whole.loss(model, model, batch, 17.0, MetricBuffer())
    loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    early = Early()
    parts = replace(whole, packed=packed, max_tokens=64)
    found, same = parts.loss(model, model, batch, 17.0, MetricBuffer(), early)
    found.backward()
    assert early.passes == len(parts.micro_batches(batch)) - 1 >= 1
    assert found.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(same, logprobs, rtol=1e-5, atol=1e-5)
    actual = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert_same_gradients(actual, expected, tolerance=3e-4)


def test_log_probabilities_and_evaluation_in_micro_batches() -> None:
    model, batch = make_model(), make_batch(*RAGGED)
    whole, parts = objective(), objective(packed=True, max_tokens=20)
    assert len(parts.micro_batches(batch)) > 1
    torch.testing.assert_close(parts.logprobs(model, batch), whole.logprobs(model, batch), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        losses = [each.loss(model, model, batch, 5.0, MetricBuffer())[0].item() for each in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.usefixtures("one_process_group")
def test_only_the_last_micro_batch_reduces_gradients() -> None:
    """Ranks may cut their slices into different numbers of micro-batches."""
    model, batch = make_model(), make_batch(*RAGGED)
    objective().loss(model, model, batch, 9.0, MetricBuffer())[0].backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    wrapped = nn.parallel.DistributedDataParallel(model)
    reduced: list[int] = []

    def count(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, count)

    @contextlib.contextmanager
    def early() -> Iterator[Callable[[torch.Tensor], None]]:
        with wrapped.no_sync():
            yield lambda loss: loss.backward()

    parts = objective(packed=True, max_tokens=20)
    parts.loss(wrapped, model, batch, 9.0, MetricBuffer(), early)[0].backward()
    assert sum(reduced) == sum(weight.numel() for weight in model.parameters())
    assert_same_gradients({name: weight.grad for name, weight in model.named_parameters()}, expected)


# Which models


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_config(), None),
        (LlamaConfig(**SMALL), None),
        (Qwen3Config(**SMALL), None),
        (MistralConfig(**SMALL, sliding_window=None), None),
        (MistralConfig(**SMALL, sliding_window=16), "a sliding window of 16 tokens"),
        (
            tiny_config(use_sliding_window=True, sliding_window=16, max_window_layers=0),
            "layers of types {'sliding_attention'}",
        ),
        (Gemma2Config(**SMALL, head_dim=8), "layers of types"),
        (LlamaConfig(**SMALL, attention_dropout=0.1), "attention_dropout"),
        (LlamaConfig(**SMALL, attn_implementation="eager"), "'eager', not 'sdpa'"),
        (FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "from outside"),
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_which_models_are_made_for_packed_rows(config: PretrainedConfig, reason: str | None) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = packing.obstacle(model)
    assert (found is None) == (reason is None), found
    assert reason is None or reason in (found or "")


class Rotten:
    """An attention function in which rows see each other."""

    def __init__(self) -> None:
        self.honest = attention.by_rows

    def __call__(self, query: Any, key: Any, value: Any, rows: attention.Rows, scaling: float | None) -> Any:
        whole = replace(rows, starts=rows.starts[[0, -1]], key_starts=rows.key_starts[[0, -1]])
        return self.honest(query, key, value, whole, scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_check_sees_rows_that_see_each_other(
    monkeypatch: pytest.MonkeyPatch, scale: float, dtype: torch.dtype
) -> None:
    """Also with weights as small as those of a fresh model, whose tokens hardly depend on what was before."""
    model = tiny_model(scale=scale).to(dtype)
    attention.install(model)
    exact = dtype == torch.float32
    assert compare(model).shortfall(exact=exact) is None
    monkeypatch.setattr(attention, "by_rows", Rotten())
    assert "log-probabilities" in (compare(model).shortfall(exact=exact) or "")


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = make_model()
    model.train()
    before = torch.get_rng_state()
    found = selfcheck.compare(model, objective(max_tokens=3), objective(max_tokens=3, packed=True))
    assert found.logprob_gap < 1e-5
    assert found.gradient_cosine > 0.99999
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_gradient_is_a_shortfall() -> None:
    assert "gradients" in (selfcheck.Agreement(0.0, 0.9).shortfall(exact=False) or "")
    assert "nats" in (selfcheck.Agreement(float("nan"), 1.0).shortfall(exact=False) or "")


def test_a_frozen_reference_is_checked_by_its_log_probabilities() -> None:
    model = make_model()
    model.requires_grad_(False)
    assert compare(model).gradient_cosine == 1.0


def compare(model: PreTrainedModel) -> selfcheck.Agreement:
    return selfcheck.compare(model, objective(), objective(packed=True))


def decide(folder: Path, model: PreTrainedModel, **changes: Any) -> Objective:
    args = GRPOConfig(str(folder), use_cpu=True, **changes)
    return speedups.decide_packing(args, [model, tiny_model()], objective(), Collectives(args.device))


def test_the_choice_on_a_cpu(tmp_path: Path) -> None:
    assert not decide(tmp_path, tiny_model()).packed
    assert not decide(tmp_path, tiny_model(), padding_free=False).packed
    model = tiny_model()
    assert decide(tmp_path, model, padding_free=True).packed
    assert model.config._attn_implementation == attention.NAME


def test_what_fails_while_a_model_is_prepared_is_a_reason_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks exchange their reasons: one that raised instead would leave the others waiting."""

    def refuse(_: PreTrainedModel) -> None:
        raise ValueError("told to fail")

    monkeypatch.setattr(attention, "install", refuse)
    assert not decide(tmp_path, tiny_model(), padding_free=True).packed


def test_a_model_that_must_keep_its_padding_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=16), dtype=torch.float32)
    with caplog.at_level(logging.INFO, "colocate_rl"):
        assert not decide(tmp_path, model, padding_free=True).packed
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "MistralForCausalLM is not made for packed rows: it has a sliding window of 16 tokens" in record.message


def test_a_model_that_fails_the_check_keeps_its_padding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "by_rows", Rotten())
    model = tiny_model()
    assert not decide(tmp_path, model, padding_free=True).packed
    assert model.config._attn_implementation == "sdpa"
    assert "computes something else on packed rows" in caplog.text


def test_a_layer_that_wants_more_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the configuration does not tell: the layer itself asks for a window."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 8
    assert not decide(tmp_path, model, padding_free=True).packed
    assert "UnsupportedAttentionError: Qwen2Attention asks for sliding_window" in caplog.text
