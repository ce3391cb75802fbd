"""Coroutine functions wait together, beside plain functions and any event loop of the caller."""

import asyncio
import functools
import time
from typing import Any

import pytest

from colocate_rl.errors import RewardError
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring.contract import RewardOptions

pytestmark = pytest.mark.unit

ROWS = 3


def ask(rewards: Rewards, **helpers: Any) -> list[list[float]]:
    try:
        ids = [[row] for row in range(ROWS)]
        table: list[list[float]] = rewards.score(
            ["p"] * ROWS, ["c"] * ROWS, ids, {"answer": [10, 20, 30]}, **helpers
        ).tolist()
    finally:
        rewards.close()
    return table


class Meeting:
    """Ends only when all of its members are in it at the same time."""

    def __init__(self, members: int) -> None:
        self.barrier = asyncio.Barrier(members)

    async def __call__(self, answer: list[int], **_: Any) -> list[float]:
        async with asyncio.timeout(20):
            await self.barrier.wait()
        return [float(value) for value in answer]


async def own(completion_ids: list[list[int]], scale: float, **_: Any) -> list[float]:
    return [scale * ids[0] for ids in completion_ids]


def plain(completions: list[str], **_: Any) -> list[float]:
    return [7.0] * len(completions)


def test_they_run_at_the_same_time_and_in_their_own_columns() -> None:
    meeting = Meeting(2)
    table = ask(Rewards([meeting, plain, meeting, functools.partial(own, scale=2.0)]))
    assert table == [[10.0, 7.0, 10.0, 0.0], [20.0, 7.0, 20.0, 2.0], [30.0, 7.0, 30.0, 4.0]]


def test_they_go_on_while_plain_functions_are_called() -> None:
    """The coroutine is the first function, but waits for the plain one that stands behind it."""
    called = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def waits(completions: list[str], **_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        async with asyncio.timeout(20):
            await called.wait()
        return [1.0] * len(completions)

    def tells(completions: list[str], **_: Any) -> list[float]:
        while not loops:
            time.sleep(0.001)
        loops[0].call_soon_threadsafe(called.set)
        return [2.0] * len(completions)

    assert ask(Rewards([waits, tells])) == [[1.0, 2.0]] * ROWS


def test_inside_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> list[list[float]]:
        return ask(Rewards([functools.partial(own, scale=1.0)]))

    assert asyncio.run(cell()) == [[0.0], [1.0], [2.0]]


def test_an_error_names_the_function() -> None:
    async def judge(**_: Any) -> list[float]:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError, match="no answer") as caught:
        ask(Rewards([plain, judge]))
    assert caught.value.__notes__ == ["It was raised by the reward function 'judge'."]
    with pytest.raises(RewardError, match=r"'short' returned 1 value\(s\) for 3"):
        ask(Rewards([functools.partial(_short)]), log_metric=None)


async def _short(**_: Any) -> list[float]:
    return [1.0]


_short.__name__ = "short"


def test_an_error_elsewhere_cancels_them() -> None:
    cancelled: list[bool] = []

    async def patient(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return []

    def failing(**_: Any) -> list[float]:
        time.sleep(0.1)
        raise KeyError("x")

    start = time.monotonic()
    with pytest.raises(KeyError):
        ask(Rewards([patient, failing]))
    assert time.monotonic() - start < 20
    assert cancelled == [True]


async def sleepy(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(60)
    return [1.0] * len(completions)


async def gives_up(**_: Any) -> list[float]:
    raise TimeoutError("the judge's own limit")


def test_a_coroutine_that_takes_too_long() -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"'sleepy' took longer than reward_timeout_s=0\.2 for 3 completions"):
        ask(Rewards([sleepy], options=RewardOptions(timeout_s=0.2)))
    assert time.monotonic() - start < 20
    with pytest.raises(TimeoutError, match="the judge's own limit"):
        ask(Rewards([gives_up], options=RewardOptions(timeout_s=20)))


def test_a_coroutine_that_takes_too_long_may_cost_its_rewards_only(caplog: pytest.LogCaptureFixture) -> None:
    options = RewardOptions(timeout_s=0.2, on_error="none")
    table = ask(Rewards([functools.partial(own, scale=1.0), sleepy, gives_up], options=options))
    assert [row[0] for row in table] == [0.0, 1.0, 2.0]
    assert all(value != value for row in table for value in row[1:])
    assert "'sleepy' gave no reward for 3 of 3 completions" in caplog.text
    assert "TimeoutError: the judge's own limit" in caplog.text


def test_closed_rewards_say_so() -> None:
    async def counted(answer: list[int], **_: Any) -> list[float]:
        return [float(value) for value in answer]

    rewards = Rewards([counted])
    assert ask(rewards) == [[10.0], [20.0], [30.0]]
    with pytest.raises(RewardError, match=r"are closed: trainer\.close\(\) ended them"):
        ask(rewards)
    plain = Rewards([lambda answer, **_: answer])
    assert ask(plain) == ask(plain), "a function in the rank itself needs nothing that could be closed"
