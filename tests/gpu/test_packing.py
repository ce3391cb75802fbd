"""Rows without padding on a GPU: the kernel against the exact way, and a model against itself with padding."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from colocate_rl.engine.protocol import Completion
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention, compiling, packing, selfcheck
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.objective import Objective
from tests.gpu.conftest import gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTHS = ((1, 1), (2, 0), (3, 57), (200, 140), (17, 1), (40, 300), (5, 64), (200, 31))


def objective(*, packed: bool, autocast: bool = False, **changes: Any) -> Objective:
    mixed = (lambda: torch.autocast("cuda", torch.bfloat16)) if autocast else contextlib.nullcontext
    return Objective(LossSettings(), 1.0, 128, mixed, packed=packed, **changes)


def make_batch(vocab: int = 288) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(vocab, (length,), generator=generator).tolist()
        return drawn

    prompts = {length: ids(length) for length, _ in LENGTHS}  # two rows share the long one
    return RolloutBatch.from_rows(
        [prompts[length] for length, _ in LENGTHS],
        [Completion(ids(length), [-5.6] * length, "stop") for _, length in LENGTHS],
        torch.randn(len(LENGTHS), generator=generator),
        keep=[True] * len(LENGTHS),
        pad_token_id=0,
    ).to(torch.device("cuda:0"))


def relative(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 2)])
def test_the_kernel_computes_attention_inside_rows(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Output and all three gradients, also with fewer key heads than query heads."""
    lengths = [1, 7, 33, 300, 64]
    cumulated = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    shapes = [(1, count, sum(lengths), size) for count in (heads, kv_heads, kv_heads)]
    exact = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    rounded = [states.detach().to(dtype).requires_grad_() for states in exact]
    weights = torch.randn((1, sum(lengths), heads, size), device="cuda")
    rows = attention.Rows(cumulated, cumulated, max(lengths), max(lengths))
    expected = attention.by_rows(exact[0], exact[1], exact[2], rows, None)
    found = attention.by_kernel(rounded[0], rounded[1], rounded[2], rows, None)
    (expected * weights).sum().backward()
    (found.float() * weights).sum().backward()
    assert found.dtype == dtype
    assert relative(found, expected) < 0.02
    for mine, other in zip(rounded, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert relative(mine.grad, other.grad) < 0.02


def both(model: PreTrainedModel, batch: RolloutBatch, **changes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities and the gradient of a loss, with and without padding."""
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(5)).cuda()
    results = []
    for packed in (False, True):
        found = objective(packed=packed, **changes).statistics(model, model, batch).logprobs
        model.zero_grad()
        (found * weights).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        results.append((found.detach()[batch.completion_mask], gradient))
    return results


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_log_probabilities_and_gradients(precision: str, kv_heads: int, checkpointing: bool) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = gpu_model(dtype, num_key_value_heads=kv_heads)
    attention.install(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    padded, packed = both(model, make_batch(), autocast=precision == "autocast")
    gap = (padded[0] - packed[0]).abs().mean()
    cosine = torch.nn.functional.cosine_similarity(padded[1], packed[1], dim=0)
    print(f"gap {float(gap):.5f} cosine {float(cosine):.6f}")
    assert float(gap) < 0.02
    assert float(cosine) > 0.999


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_layers_and_head(dtype: torch.dtype, checkpointing: bool) -> None:
    """The same numbers, for several sizes, with one compilation of the layers."""
    model = gpu_model(dtype, num_key_value_heads=2)
    attention.install(model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch()
    parts = [batch, batch.rows([2, 3, 7]), batch.rows([5, 6])]
    plain = [both(model, part)[1] for part in parts]
    compiling.install(model)
    torch._dynamo.utils.counters.clear()
    fast = [both(model, part, compiled=True)[1] for part in parts]
    for (expected, gradient), (found, mine) in zip(plain, fast, strict=True):
        assert float((expected - found).abs().mean()) < (0.02 if dtype == torch.bfloat16 else 1e-4)
        assert float(torch.nn.functional.cosine_similarity(gradient, mine, dim=0)) > 0.999
    with torch.compiler.set_stance("fail_on_recompile"):
        both(model, batch.rows([1, 3, 4, 7]), compiled=True)


def test_in_float32_it_is_exact() -> None:
    model = gpu_model(torch.float32, num_key_value_heads=2)
    attention.install(model)
    padded, packed = both(model, make_batch())
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-4, atol=1e-4)
    assert relative(packed[1], padded[1]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_start(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_model(dtype, num_key_value_heads=2)
    assert packing.obstacle(model) is None
    attention.install(model)
    exact = dtype == torch.float32
    found = selfcheck.compare(model, objective(packed=False), objective(packed=True))
    print(found)
    assert found.shortfall(exact=exact) is None
    honest = attention.by_kernel if dtype == torch.bfloat16 else attention.by_rows

    def rotten(query: Any, key: Any, value: Any, rows: attention.Rows, scaling: float | None) -> torch.Tensor:
        starts, key_starts = rows.starts[[0, -1]], rows.key_starts[[0, -1]]
        whole = attention.Rows(starts, key_starts, int(starts[-1]), int(key_starts[-1]))
        return honest(query, key, value, whole, scaling)

    monkeypatch.setattr(attention, honest.__name__, rotten)
    agreement = selfcheck.compare(model, objective(packed=False), objective(packed=True))
    assert agreement.shortfall(exact=exact) is not None


def test_packed_rows_take_less_memory() -> None:
    model = gpu_model(num_key_value_heads=2)
    attention.install(model)
    batch = make_batch()
    both(model, batch)
    peaks = []
    for packed in (False, True):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        objective(packed=packed).statistics(model, model, batch).logprobs.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]
