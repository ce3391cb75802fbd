"""Several ranks and a streamed batch: the optimizer step of a batch that came at once, in any finishing order."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer, engines, settings
from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec, Span, Work
from tests.ranks.launch import Ranks, outcome
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

Trained = tuple[dict[str, torch.Tensor], list[dict[str, float]]]
FIGURES = (
    "loss", "grad_norm", "entropy", "kl", "reward", "reward_std", "completions/min_length", "completions/mean_length",
    "num_tokens", "staleness", "sampling/sampling_logp_difference/mean", "balance/rank_tokens_before",
)  # fmt: skip


class TricklingEngine(LengthyEngine):
    """Finishes requests in a random order, some at a time, and may end a poll with an error."""

    def __init__(self, seed: int, *, fails_after: int | None = None) -> None:
        self._draw = random.Random(seed)
        self._left: list[tuple[int, list[Completion]]] = []
        self._polls_left = fails_after

    def begin(self, work: Work, sampling: SamplingSpec) -> None:
        self._left = list(enumerate(self.generate(work.requests[: work.num_own], sampling)))
        self._draw.shuffle(self._left)

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        if self._polls_left is not None:
            self._polls_left -= 1
            if self._polls_left < 0:
                raise OSError("the engine's own mistake")
        return [self._left.pop() for _ in range(min(self._draw.randrange(3), len(self._left)))]

    def finish(self) -> tuple[list[tuple[int, list[Completion]]], Span]:
        rest, self._left = self._left, []
        return rest, Span(0.0, 1.0)


def train_on_rank(
    folder: str, seed: int | None, num_engines: int, deal: bool = True, fails_after: int | None = None, **changes: Any
) -> Trained:
    """Three steps; without a seed the engine answers all at once."""
    rank = Collectives(torch.device("cpu")).rank
    engine: LengthyEngine | None = None
    if rank < num_engines:
        broken = fails_after if rank == num_engines - 1 else None
        engine = LengthyEngine() if seed is None else TricklingEngine(seed + rank, fails_after=broken)
    kept = engines.build_engine, settings.DENOMINATORS
    engines.build_engine = lambda *_: engine  # type: ignore[assignment]
    if not deal:
        settings.DENOMINATORS = dict.fromkeys(kept[1], "slice tokens")  # type: ignore[attr-defined]
    try:
        values: dict[str, Any] = {
            "use_cpu": True,
            "num_vllm_gpus": num_engines,
            "per_device_train_batch_size": 6,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 32,
            "beta": 0.1,
            "learning_rate": 0.5,
            "optim": "sgd",
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
            "vllm_logprob_gap_limit": 0,
            "vllm_importance_sampling_mode": "token_truncate",
            "overlap": "none" if seed is None else "stream",
        }
        prompts = datasets.Dataset.from_dict({"prompt": [f"{'ab' * (n % 7)}{n}=" for n in range(24)]})
        trainer = GRPOTrainer(
            tiny_model(tied=False),
            even_ids,
            GRPOConfig(folder, **{**values, **changes}),
            prompts,
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
    finally:
        engines.build_engine = kept[0]
        settings.DENOMINATORS = kept[1]
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return weights, [line for line in trainer.state.log_history if "loss" in line]


def train(group: Ranks, folder: Path, *arguments: Any, **changes: Any) -> list[Trained]:
    return group.run(_with_keywords, (str(folder), *arguments), changes, timeout_s=90)


def _with_keywords(arguments: tuple[Any, ...], changes: dict[str, Any]) -> Trained:
    torch.set_num_threads(1)
    return train_on_rank(*arguments, **changes)


def assert_same_steps(found: list[Trained], expected: list[Trained], figures: tuple[str, ...] = FIGURES) -> None:
    start = dict(tiny_model(tied=False).named_parameters())
    weights, lines = expected[0]
    moved = max(float((weights[name] - weight.detach()).abs().max()) for name, weight in start.items())
    assert moved > 1e-3
    for other, _ in found:
        for name, weight in weights.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-5 * moved, msg=lambda m, n=name: n + m)
    for line, same in zip(lines, found[0][1], strict=True):
        for name in figures:
            assert (name in same) == (name in line), name
            if name in line:
                assert same[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_two_ranks_take_the_step_of_none(
    ranks: Callable[[int], Ranks], tmp_path: Path, loss_type: str, num_engines: int
) -> None:
    """12 rows a rank in groups of 4: groups stay on a rank, or not, as rows are dealt."""
    expected = train(ranks(2), tmp_path, None, num_engines, loss_type=loss_type)
    for order in (1, 20):
        assert_same_steps(train(ranks(2), tmp_path, order, num_engines, loss_type=loss_type), expected)


def test_groups_on_two_ranks_and_one_pass_for_all(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 1, "num_iterations": 2}
    expected = train(ranks(2), tmp_path, None, 1, **changes)
    assert_same_steps(train(ranks(2), tmp_path, 3, 1, **changes), expected)


@pytest.mark.parametrize(("loss_type", "rows", "most"), [("dapo", 6, 1.1), ("grpo", 10, 1.03), ("dr_grpo", 10, 1.03)])
def test_dealing_rows_to_ranks_evens_tokens_and_changes_no_step(
    ranks: Callable[[int], Ranks], tmp_path: Path, loss_type: str, rows: int, most: float
) -> None:
    """Each rank has the rows that it asked for, or rows by their tokens: 3 whole groups of 4, or 10 of 20 rows."""
    changes = {"loss_type": loss_type, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 12 // rows}
    expected = train(ranks(2), tmp_path, None, 1, False, **changes)
    found = train(ranks(2), tmp_path, None, 1, True, **changes)
    assert_same_steps(found, expected, ("loss", "grad_norm", "entropy", "kl", "reward", "num_tokens"))
    assert all("balance/rank_tokens" not in line for line in expected[0][1])
    for line in found[0][1]:
        assert 1 <= line["balance/rank_tokens"] < min(most, line["balance/rank_tokens_before"])


def failing(arguments: tuple[Any, ...], changes: dict[str, Any]) -> Any:
    return outcome(lambda: _with_keywords(arguments, changes))


def test_an_engine_that_fails_in_the_middle_ends_all_ranks(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    results = ranks(2).run(failing, (str(tmp_path), 5, 2), {"fails_after": 3}, timeout_s=90)
    assert [result.kind for result in results] == ["PeerError", "OSError"]
    assert "rank 1 failed while generating completions" in results[0].message
    assert all(result.seconds < 60 for result in results)
    train(ranks(2), tmp_path, 5, 2)  # the group is still in step
