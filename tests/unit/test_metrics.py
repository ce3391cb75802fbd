"""Figures between two logs: what is averaged, weighted, extreme or summed, over ranks and over time; and the clock."""

import contextlib
import math
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.runlog import with_training

pytestmark = pytest.mark.unit

ALONE = Collectives(torch.device("cpu"))


class Together:
    """The collectives of several ranks whose buffers are flushed one after the other, in two rounds.

    The first round only notes what each rank offers; the second gives every rank the joined answers.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.offers: dict[int, list[Any]] = {}
        self.call = 0

    def _offer(self, value: Any) -> list[Any]:
        offers = self.offers.setdefault(self.call, [])
        self.call += 1
        if len(offers) < self.num_ranks:
            offers.append(value)
        return offers

    def gather_objects(self, value: Any) -> list[Any]:
        return list(self._offer(value))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._offer(values)).sum(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._offer(values)).amax(0)


def share(buffer: MetricBuffer, name: str, numerator: float, denominator: float) -> None:
    buffer.share(name, torch.tensor(numerator), torch.tensor(denominator))


# One rank


def test_means_over_time_skip_nan() -> None:
    buffer = MetricBuffer()
    for value in (1.0, math.nan, torch.tensor(4.0), 4):
        buffer.mean("a", value)
    buffer.mean("nothing", math.nan)
    assert buffer.flush(ALONE) == {"a": 3.0, "nothing": None}


def test_shares_are_sums_over_sums() -> None:
    """A micro-batch of 30 tokens weighs three times one of 10."""
    buffer = MetricBuffer()
    share(buffer, "entropy", 10 * 1.0, 10)
    share(buffer, "entropy", 30 * 2.0, 30)
    share(buffer, "empty", 0.0, 0.0)
    assert buffer.flush(ALONE) == {"entropy": 1.75, "empty": None}


def test_extremes() -> None:
    buffer = MetricBuffer()
    for value in (2.0, -5.0, math.nan):
        buffer.largest("most", torch.tensor(value))
        buffer.smallest("least", torch.tensor(value))
    buffer.largest("nothing", torch.tensor(math.nan))
    buffer.smallest("nothing either", torch.tensor(math.nan))
    assert buffer.flush(ALONE) == {
        "most": 2.0,
        "least": -5.0,
        "nothing": None,
        "nothing either": None,
    }


def test_latest_and_totals() -> None:
    buffer = MetricBuffer()
    for value in (1.0, 5.0, 3.0):
        buffer.latest("num_tokens", value)
        buffer.total("engine/0/tokens", value)
    assert buffer.flush(ALONE) == {"num_tokens": 3.0, "engine/0/tokens": 9.0}


def test_flush_starts_afresh_but_keeps_the_latest() -> None:
    buffer = MetricBuffer()
    buffer.mean("a", 1.0)
    buffer.largest("b", torch.tensor(1.0))
    buffer.latest("c", 1.0)
    buffer.total("d", 1.0)
    share(buffer, "e", 1.0, 1.0)
    assert len(buffer.flush(ALONE)) == 5
    assert buffer.flush(ALONE) == {"c": 1.0}
    buffer.mean("a", 9.0)
    buffer.latest("c", 2.0)
    assert buffer.flush(ALONE) == {"a": 9.0, "c": 2.0}


def test_figures_do_not_keep_the_graph_alive() -> None:
    buffer = MetricBuffer()
    live = torch.tensor(2.0, requires_grad=True)
    buffer.mean("a", live * 2)
    buffer.share("b", live * 3, live)
    buffer.largest("c", live)
    held = [*buffer._shares["a"], *buffer._shares["b"], *buffer._largest["c"]]
    assert not any(value.requires_grad for value in held)
    assert buffer.flush(ALONE) == {"a": 4.0, "b": 3.0, "c": 2.0}


def test_large_counts_keep_their_digits() -> None:
    """Token counts pass 2**24, where float32 loses whole tokens."""
    buffer = MetricBuffer()
    for _ in range(3):
        share(buffer, "a", 2.0**24 + 2, 1.0)
    buffer.latest("num_tokens", 2**40 + 1)
    assert buffer.flush(ALONE) == {"a": 2.0**24 + 2, "num_tokens": 2**40 + 1}


# Several ranks


def test_ranks_are_joined_also_where_they_know_different_names() -> None:
    def fill(rank: int) -> MetricBuffer:
        buffer = MetricBuffer()
        share(buffer, "kl", [1.0, 9.0][rank], [1.0, 3.0][rank])
        buffer.mean("reward", [1.0, 2.0][rank])
        buffer.largest("most", torch.tensor([3.0, 7.0][rank]))
        buffer.smallest("least", torch.tensor([3.0, 7.0][rank]))
        buffer.latest("num_tokens", 5.0)
        buffer.total("tokens", 6.0)
        if rank == 1:
            buffer.mean("only rank 1", 4.0)
            buffer.largest("most of rank 1", torch.tensor(-2.0))
        else:
            buffer.mean("a name of rank 0", 8.0)
        return buffer

    expected = {
        "kl": 2.5,
        "reward": 1.5,
        "most": 7.0,
        "least": 3.0,
        "num_tokens": 5.0,
        "tokens": 6.0,
        "only rank 1": 4.0,
        "most of rank 1": -2.0,
        "a name of rank 0": 8.0,
    }
    ranks = Together(2)
    names = [(list(buffer._shares), list(buffer._largest)) for buffer in (fill(rank) for rank in range(2))]
    ranks.offers[0] = names  # every rank has offered its names before anybody sums
    for rank in range(2):
        ranks.call = 0
        fill(rank).flush(ranks)  # type: ignore[arg-type]
    for rank in range(2):
        ranks.call = 0
        assert fill(rank).flush(ranks) == expected  # type: ignore[arg-type]


def test_an_idle_rank_takes_part_in_every_collective() -> None:
    """A rank with nothing to report still sums and compares as often as the others, or they would wait for it."""
    busy, idle = MetricBuffer(), MetricBuffer()
    busy.mean("a", 1.0)
    busy.largest("b", torch.tensor(1.0))
    ranks = Together(2)
    ranks.offers[0] = [(["a"], ["b"]), ([], [])]
    calls = []
    for buffer in (busy, idle):
        ranks.call = 0
        buffer.flush(ranks)  # type: ignore[arg-type]
        calls.append(ranks.call)
    assert calls == [3, 3]


# The clock


def test_the_clock_charges_phases_and_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    waits = []

    def wait() -> None:
        waits.append(now[0])
        now[0] += 0.5  # pending work of the device

    monkeypatch.setattr("colocate_rl.metrics.time.monotonic", lambda: now[0])
    clock = PhaseClock(wait)
    now[0] += 1
    with clock.phase("generate"):  # waits before and after
        now[0] += 2
    with clock.phase("generate"):
        now[0] += 3
    with contextlib.suppress(ValueError), clock.phase("score"):  # an error is charged too
        now[0] += 4
        raise ValueError
    lap = clock.lap()
    assert lap.phases == {"generate": 6.0, "score": 4.5}
    assert lap.total == 1 + 2 + 3 + 4 + 7 * 0.5
    assert lap.spans == [("generate", 101.5, 104), ("generate", 104.5, 108), ("score", 108.5, 113)]
    assert (lap.start, lap.end) == (100, 113.5)
    assert with_training(lap) == [
        ("train", 100, 101.5), lap.spans[0], ("train", 104, 104.5), lap.spans[1], ("train", 108, 108.5), lap.spans[2],
        ("train", 113, 113.5),
    ]  # fmt: skip
    assert len(waits) == 7

    now[0] += 10
    assert clock.lap() == (10.5, {}, [], 113.5, 124)
    with clock.phase("sync"):
        now[0] += 1
    clock.restart()
    now[0] += 1
    assert clock.lap().phases == {}


def test_many_looks_are_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("colocate_rl.metrics.time.monotonic", lambda: now[0])
    clock = PhaseClock(lambda: None)
    for name in ("generate", "generate", "score", "generate"):
        with clock.phase(name):
            now[0] += 0.01
        now[0] += 0.001
    spans = clock.lap().spans
    assert [(span.phase, pytest.approx(span.start), pytest.approx(span.end)) for span in spans] == [
        ("generate", 0, 0.021), ("score", 0.022, 0.032), ("generate", 0.033, 0.043),
    ]  # fmt: skip
