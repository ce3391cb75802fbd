"""A run on an engine that samples from a stream of its own, to be broken off and gone on with."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer
from colocate_rl.engine.protocol import Completion, Request, SamplingSpec, Span, Work
from tests.tiny import tiny_model, tiny_tokenizer


class StreamEngine:
    """Its completions depend on the weights it has, on its stream's seed and on all it drew since."""

    def __init__(self) -> None:
        self._stream = random.Random(0)
        self._mark = ""

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        return [[self._completion() for _ in range(request.num_completions)] for request in requests]

    def _completion(self) -> Completion:
        draw = random.Random(f"{self._mark}/{self._stream.random()}")
        ids = [draw.randrange(256) for _ in range(draw.choice((0, 1, 2, 5, 30)))]
        return Completion(ids, [-5.5 - draw.random() for _ in ids], draw.choice(("stop", "length")))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._mark = repr([float(weight.detach().double().sum()) for _, weight in weights])

    def reseed(self, seed: int) -> None:
        self._stream = random.Random(seed)

    def close(self) -> None: ...


class BackgroundStreamEngine(StreamEngine):
    """The same while its rank does something else."""

    _answers: list[tuple[int, list[Completion]]] | None = None

    def begin(self, work: Work, sampling: SamplingSpec) -> None:
        assert self._answers is None, "it is busy"
        self._answers = list(enumerate(self.generate(work.requests, sampling)))

    def reseed(self, seed: int) -> None:
        assert self._answers is None, "it is busy"
        super().reseed(seed)

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        return [] if not self._answers else [self._answers.pop()]

    def finish(self) -> tuple[list[tuple[int, list[Completion]]], Span]:
        rest, self._answers = self._answers, None
        assert rest is not None
        return rest, Span(0.0, 1.0)


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def make(folder: Path, **changes: Any) -> GRPOTrainer:
    """Two epochs of two generation batches, each of two optimizer steps, used twice: 16 steps on one rank."""
    values: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "num_generations": 2,
        "max_completion_length": 32,
        "beta": 0.1,
        "learning_rate": 0.01,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "vllm_logprob_gap_limit": 0,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 2,
    }
    prompts = datasets.Dataset.from_dict({"prompt": [f"{'ab' * (n % 7)}{n}=" for n in range(9)]})
    held_out = datasets.Dataset.from_dict({"prompt": ["1=", "2="]})
    args = GRPOConfig(str(folder), **{**values, **changes})
    return GRPOTrainer(tiny_model(scale=2.0), even_ids, args, prompts, held_out, processing_class=tiny_tokenizer())


Ran = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def run(folder: Path, step: int | None, **changes: Any) -> Ran:
    """Log and final weights of the whole run, or of one that goes on after ``step``."""
    trainer = make(folder, **changes)
    trainer.train(resume_from_checkpoint=None if step is None else str(folder / f"checkpoint-{step}"))
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return trainer.state.log_history, weights


def assert_same_run(found: Ran, expected: Ran) -> None:
    """Equal to 1e-6 in every figure but times and what engines say of a batch that another process asked for."""
    moved = max(
        float((expected[1][name] - weight.detach()).abs().max())
        for name, weight in tiny_model(scale=2.0).named_parameters()
    )
    assert moved > 1e-2
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-6)
    assert len(found[0]) == len(expected[0])
    for line, same in zip(found[0][:-1], expected[0][:-1], strict=True):  # the last one sums up times
        chosen = {name for name in same if not _is_of_the_machine(name)}
        assert {name for name in line if not _is_of_the_machine(name)} == chosen, same["step"]
        for name in chosen:
            assert line[name] == pytest.approx(same[name], rel=1e-6, abs=1e-6), (same["step"], name)


def _is_of_the_machine(name: str) -> bool:
    kinds = ("time", "engine/", "rank/", "balance/engine", "eval_runtime", "eval_samples_per", "eval_steps_per")
    return any(kind in name for kind in kinds)
