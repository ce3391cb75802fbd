"""Chunked log-probabilities and entropies against full logits: values, gradients, padding, wrappers."""

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251 (a real DistributedDataParallel needs a group)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from colocate_rl.engine.protocol import Completion
from colocate_rl.errors import ConfigError
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import Head, PassExtras, TokenStatistics, completion_statistics
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit

VOCAB = 288
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_batch(*lengths: tuple[int, int], seed: int = 0) -> RolloutBatch:
    """Random rows of (prompt length, completion length)."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(VOCAB, (length,), generator=generator).tolist()
        return drawn

    return RolloutBatch.from_rows(
        [ids(prompt) for prompt, _ in lengths],
        [Completion(ids(length), [0.0] * length, "stop") for _, length in lengths],
        torch.zeros(len(lengths)),
        keep=[True] * len(lengths),
        pad_token_id=7,
    )


def statistics(
    model: nn.Module,
    batch: RolloutBatch,
    *,
    wrapper: nn.Module | None = None,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> TokenStatistics:
    return completion_statistics(
        model if wrapper is None else wrapper,
        model,
        batch,
        temperature=temperature,
        chunk=chunk,
        autocast=contextlib.nullcontext,
    )


def full_statistics(logits: torch.Tensor, batch: RolloutBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each completion token from whole logits, one token at a time."""
    shape = batch.input_ids.shape
    logprobs = torch.zeros(shape, dtype=logits.dtype)
    entropy = torch.zeros(shape, dtype=logits.dtype)
    for row, token in batch.completion_mask.nonzero().tolist():
        distribution = torch.log_softmax(logits[row, token - 1] / temperature, dim=-1)
        picked = distribution[batch.input_ids[row, token]]
        place = (torch.tensor(row), torch.tensor(token))
        logprobs = logprobs.index_put(place, picked)
        entropy = entropy.index_put(place, -(distribution.exp() * distribution).sum())
    return logprobs, entropy


def forward_logits(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits


def check_against_full(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    temperature: float,
    chunk: int,
    full: Callable[[PreTrainedModel, RolloutBatch], torch.Tensor] = forward_logits,
) -> None:
    """Values, entropies and the gradient of every parameter equal those of the ordinary forward pass."""
    model.eval()
    weights = torch.randn(
        batch.input_ids.shape, generator=torch.Generator().manual_seed(5)
    )  # a different gradient for every token
    found = statistics(model, batch, temperature=temperature, chunk=chunk)
    expected, entropy = full_statistics(full(model, batch).double(), batch, temperature)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)

    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    for ours, theirs in (
        (found.logprobs * weights, expected * weights),
        (found.entropy * weights, entropy * weights),
        (found.logprobs * weights + found.entropy, expected * weights + entropy),
    ):
        mine_all = torch.autograd.grad(ours.sum(), parameters, retain_graph=True)
        other_all = torch.autograd.grad(theirs.sum(), parameters, retain_graph=True)
        for name, mine, other in zip(names, mine_all, other_all, strict=True):
            scale = float(other.abs().max())
            assert scale > 0, f"{name} has no gradient at all: the comparison would say nothing"
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


# Values and gradients


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("tied", [True, False])
def test_equal_to_full_logits(tied: bool, temperature: float, chunk: int) -> None:
    model = tiny_model(tied=tied)
    batch = make_batch((2, 5), (4, 1), (1, 7))
    check_against_full(model, batch, temperature=temperature, chunk=chunk)


def test_equal_to_full_logits_with_a_bias() -> None:
    model = tiny_model(tied=False)
    model.lm_head = nn.Linear(64, VOCAB, bias=True)
    nn.init.normal_(model.lm_head.bias)
    check_against_full(model, make_batch((2, 5), (3, 2)), temperature=0.7, chunk=3)


@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
        CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logit_scale=0.25),
        GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, logits_scaling=4.0),
    ],
    ids=["soft cap", "logit scale", "logits scaling"],
)
def test_equal_to_the_model_that_bends_its_logits(config: PretrainedConfig, chunk: int) -> None:
    """The library's own models of these kinds are the reference, not our reading of their configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)
    batch = make_batch((2, 4), (3, 2))
    bent = Head.of(model)
    assert bent.softcap is not None or bent.scale != 1.0
    check_against_full(model, batch, temperature=0.8, chunk=chunk)


def test_soft_cap_after_scale_by_formula() -> None:
    """z = cap tanh(scale x W^T / cap), which no single model of the library shows."""
    model = tiny_model(tied=False)
    model.config.final_logit_softcapping = 3.0
    model.config.logit_scale = 0.5

    def full(policy: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
        hidden = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        raw = hidden.last_hidden_state @ policy.lm_head.weight.t()
        return 3.0 * torch.tanh(0.5 * raw / 3.0)

    batch = make_batch((2, 5), (4, 2))
    check_against_full(model, batch, temperature=0.9, chunk=4, full=full)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_head_in_float32_on_a_decoder_in_bfloat16(mixed: bool) -> None:
    """Weights in bfloat16, or computing in it: the head's logits are those of float32 factors, and so are gradients."""
    model, batch = tiny_model(tied=False), make_batch((3, 5), (2, 7))
    if not mixed:
        model = model.to(torch.bfloat16)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=mixed)

    def compute(fp32_head: bool) -> TokenStatistics:
        return completion_statistics(
            model, model, batch, temperature=0.7, chunk=5, autocast=autocast, extras=PassExtras(fp32_head=fp32_head)
        )

    with autocast():
        states = model.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    head = model.lm_head.weight
    logits = states.float() @ head.float().t()
    expected, entropy = full_statistics(logits.double(), batch, 0.7)
    found, rounded = compute(True), compute(False)
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert (rounded.logprobs - found.logprobs).abs().max() > 1e-3
    (mine,) = torch.autograd.grad(found.logprobs.sum(), head)
    (other,) = torch.autograd.grad(expected.sum(), head)
    assert mine.dtype == head.dtype
    tolerance = 1e-5 if mixed else 1e-2
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = tiny_model(tied=False)
    model.lm_head = nn.Sequential(nn.Linear(64, VOCAB))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has an output head of type Sequential"):
        statistics(model, make_batch((2, 2)))


def test_a_frozen_head_gets_no_gradient_and_the_rest_does() -> None:
    model = tiny_model(tied=False)
    model.lm_head.weight.requires_grad_(False)
    statistics(model, make_batch((2, 3))).logprobs.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


def test_probabilities_over_the_vocabulary_sum_to_one() -> None:
    """Every possible next token scored in turn: the distribution is whole, and its entropy is the one reported."""
    model = tiny_model()
    rows = VOCAB
    ids = torch.arange(rows)[:, None]
    prompt = torch.tensor([[5, 9, 200]]).expand(rows, -1)
    batch = RolloutBatch.from_rows(
        prompt.tolist(),
        [Completion(row, [0.0], "stop") for row in ids.tolist()],
        torch.zeros(rows),
        keep=[True] * rows,
        pad_token_id=0,
    )
    with torch.no_grad():
        found = statistics(model, batch, temperature=1.7, chunk=50)
    logprobs = found.logprobs[:, 3].double()
    assert float(logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(found.entropy[0, 3]) == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-4)


# Padding and shapes (F6, F7)


def test_rows_do_not_depend_on_the_padding_beside_them() -> None:
    """Prompts of 3 and 30 tokens together equal each of them alone."""
    model = tiny_model()
    batch = make_batch((3, 6), (30, 4), (17, 11))
    with torch.no_grad():
        together = statistics(model, batch)
        for row in range(3):
            alone = statistics(model, batch.rows([row]))
            width = alone.logprobs.shape[1]
            torch.testing.assert_close(together.logprobs[row, :width], alone.logprobs[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(together.entropy[row, :width], alone.entropy[0], rtol=0, atol=1e-5)
            assert together.logprobs[row, width:].abs().sum() == 0


def test_shapes_and_zeros_outside_the_completion() -> None:
    batch = make_batch((3, 2), (1, 6))
    with torch.no_grad():
        found = statistics(tiny_model(), batch)
    assert found.logprobs.shape == found.entropy.shape == batch.completion_mask.shape
    assert bool((found.logprobs[batch.completion_mask] < 0).all())
    assert bool((found.entropy[batch.completion_mask] > 0).all())
    assert found.logprobs[~batch.completion_mask].abs().sum() == 0
    assert found.entropy[~batch.completion_mask].abs().sum() == 0


@pytest.mark.parametrize("lengths", [[(3, 0), (2, 4)], [(3, 0), (2, 0)]])
def test_completions_without_tokens(lengths: list[tuple[int, int]]) -> None:
    """No error, no NaN, and a backward pass that every rank can take part in."""
    model = tiny_model()
    batch = make_batch(*lengths)
    found = statistics(model, batch, chunk=2)
    assert found.logprobs.requires_grad
    assert found.logprobs[0].abs().sum() == 0
    found.logprobs.sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    moved = max(float(grad.abs().max()) for grad in grads if grad is not None)
    assert (moved > 0) == bool(batch.completion_mask.any())


def test_training_mode_and_gradient_state_are_left_alone() -> None:
    model = tiny_model()
    model.train()
    with torch.no_grad():
        assert not statistics(model, make_batch((2, 2))).logprobs.requires_grad
    assert model.training
    assert statistics(model, make_batch((2, 2))).logprobs.requires_grad


# Wrappers


class CountingWrapper(nn.Module):
    """A wrapper that knows nothing but the forward pass of what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def bad_batch() -> RolloutBatch:
    """A batch with an id that the embedding does not have."""
    return RolloutBatch.from_rows(
        [[1, 2]],
        [Completion([10_000], [0.0], "stop")],
        torch.zeros(1),
        keep=[True],
        pad_token_id=0,
    )


def test_the_wrapper_takes_part_and_forward_is_restored() -> None:
    model, batch = tiny_model(), make_batch((2, 3), (4, 1))
    wrapper = CountingWrapper(model)
    through = statistics(model, batch, wrapper=wrapper)
    assert wrapper.calls == 1
    assert "forward" not in vars(model)
    torch.testing.assert_close(through.logprobs, statistics(model, batch).logprobs, rtol=0, atol=0)
    assert forward_logits(model, batch).shape == (2, 5, VOCAB)


def test_a_forward_of_the_instance_is_restored() -> None:
    """Accelerate's mixed precision puts a ``forward`` on the instance; it must survive."""
    model, batch = tiny_model(), make_batch((2, 3))
    own = model.forward
    model.forward = own
    statistics(model, batch, wrapper=CountingWrapper(model))
    assert vars(model)["forward"] is own


@pytest.mark.parametrize("own_forward", [False, True])
def test_forward_is_restored_after_an_error(own_forward: bool) -> None:
    model = tiny_model()
    if own_forward:
        model.forward = model.forward
    before = vars(model).get("forward")
    with pytest.raises(IndexError):
        statistics(model, bad_batch(), wrapper=CountingWrapper(model))
    assert vars(model).get("forward") is before
    assert ("forward" in vars(model)) == own_forward
    assert forward_logits(model, make_batch((2, 1))).shape == (1, 3, VOCAB)


class RefusingWrapper(nn.Module):
    """A wrapper that fails before it reaches what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("refused before the policy ran")


def test_forward_is_restored_when_the_wrapper_itself_fails() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="refused before the policy ran"):
        statistics(model, make_batch((2, 2)), wrapper=RefusingWrapper(model))
    assert "forward" not in vars(model)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=30),
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
def test_distributed_data_parallel_reduces_the_gradients() -> None:
    """DDP's own hooks must run: its communication hook sees the gradient of every parameter."""
    model, batch = tiny_model(), make_batch((2, 3), (4, 2))
    expected = torch.autograd.grad(statistics(model, batch).logprobs.sum(), list(model.parameters()))
    wrapped = nn.parallel.DistributedDataParallel(model)
    seen: list[int] = []

    def count(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    wrapped.register_comm_hook(None, count)
    statistics(model, batch, wrapper=wrapped).logprobs.sum().backward()
    assert sum(seen) == sum(parameter.numel() for parameter in model.parameters())
    for parameter, plain in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * plain)
