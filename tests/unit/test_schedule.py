"""One step ahead: what is under way when, with which weights, and how old it is when it is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from colocate_rl.engine.protocol import Completion
from colocate_rl.errors import EngineError
from colocate_rl.metrics import PhaseClock
from colocate_rl.rollout.stages import Answered
from colocate_rl.schedule import OneStepAhead, Synchronous


@dataclass
class Engines:
    """Stands for rollout and weight sync at once; refuses what real engines refuse."""

    version: int = -1
    busy: int | None = None
    events: list[str] = field(default_factory=list)

    def sync(self, policy_version: int) -> bool:
        assert self.busy is None, "weights arrived while the engines generate"
        moved = policy_version != self.version
        self.version = policy_version
        if moved:
            self.events.append(f"sync {policy_version}")
        return moved

    def begin(self, rows: Sequence[Any], *, policy_version: int, seed: int | None) -> Any:
        assert self.busy is None, "two batches at once"
        assert self.version == policy_version
        self.busy = rows[0]["batch"]
        self.events.append(f"begin {self.busy}")
        return rows, policy_version

    def wait(self, begun: Any) -> Answered:
        rows, version = begun
        assert self.busy == rows[0]["batch"]
        self.busy = None
        self.events.append(f"got {rows[0]['batch']}")
        return Answered(list(rows), [(1,)], [Completion([5], [0.0], "stop", version)], [])


def rows(number: int) -> list[dict[str, int]]:
    return [{"batch": number}]


def schedule(engines: Engines, last: int = 99, max_staleness: int = 1) -> OneStepAhead:
    clock = PhaseClock(lambda: None)
    coming = lambda number: rows(number) if number <= last else None  # noqa: E731
    return OneStepAhead(engines, engines, clock, lambda number: None, coming, max_staleness)  # type: ignore[arg-type]


def train(plan: OneStepAhead, engines: Engines, steps: int, first: int = 0) -> list[int]:
    """Ages of the completions of each step, one optimizer step per batch."""
    ages = []
    for step in range(first, first + steps):
        answered = plan.next(step, rows(step), step)
        assert answered.rows == rows(step)
        engines.events.append(f"train {step}")
        ages.append(step - answered.completions[0].policy_version)
    return ages


def test_data_are_one_version_old_and_the_next_batch_is_under_way_while_training() -> None:
    engines = Engines()
    assert train(schedule(engines, last=3), engines, 4) == [0, 1, 1, 1]
    assert engines.events == [
        *("sync 0", "begin 0", "got 0", "begin 1", "train 0"),
        *("got 1", "sync 1", "begin 2", "train 1"),
        *("got 2", "sync 2", "begin 3", "train 2"),
        *("got 3", "train 3"),
    ]


def test_an_evaluation_in_between_loses_nothing() -> None:
    engines = Engines()
    plan = schedule(engines)
    assert train(plan, engines, 2) == [0, 1]
    plan.pause()
    engines.sync(2)  # the evaluation needs current weights
    plan.pause()
    assert train(plan, engines, 2, first=2) == [1, 1]
    assert engines.events.count("begin 2") == 1


def test_a_resume_elsewhere_starts_afresh() -> None:
    engines = Engines()
    plan = schedule(engines)
    train(plan, engines, 2)
    assert train(plan, engines, 2, first=7) == [0, 1]


def test_older_data_are_refused() -> None:
    engines = Engines()
    plan = schedule(engines)
    plan.next(0, rows(0), 0)
    with pytest.raises(EngineError, match="max_staleness=1"):
        plan.next(1, rows(1), 3)
    engines = Engines()
    plan = schedule(engines, max_staleness=3)
    plan.next(0, rows(0), 0)
    plan.next(1, rows(1), 3)


def test_synchronous_trains_what_the_current_weights_sampled() -> None:
    engines = Engines()
    plan = Synchronous(engines, engines, PhaseClock(lambda: None), lambda number: None)  # type: ignore[arg-type]
    for step in range(3):
        assert plan.next(step, rows(step), step).completions[0].policy_version == step
        plan.pause()
    assert engines.events[:4] == ["sync 0", "begin 0", "got 0", "sync 1"]


def test_what_failed_in_the_background_of_a_broken_off_run_does_not_end_the_next() -> None:
    engines = Engines()
    plan = schedule(engines)
    train(plan, engines, 2)

    def fail(begun: Any) -> Answered:
        engines.busy = None
        raise EngineError("told to fail")

    engines.wait = fail  # type: ignore[method-assign]
    plan.forget()
    del engines.wait
    assert train(plan, engines, 2, first=5) == [0, 1]
