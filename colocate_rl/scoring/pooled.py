"""A reward function in worker processes: one call per prompt, and only completions whose call fails lose a reward."""

import concurrent.futures
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from colocate_rl.errors import RewardError
from colocate_rl.scoring.contract import RewardOptions, RewardRequest, Scores, checked_values
from colocate_rl.scoring.worker import Answer, CallFailure
from colocate_rl.scoring.workers import WorkerPool

Outcome = Answer | CallFailure


class PooledSource:
    """Calls a function once per prompt with that prompt's completions on this rank, as many at a time as workers.

    Where ``on_error`` is "none", a failed call is made again for each of its completions alone, so that one bad
    completion does not cost the others their reward.

    Args:
        name: for logs and messages.
        number: of the function in the pool.
        pool: shared by all functions.
        options: see :class:`colocate_rl.scoring.contract.RewardOptions`.
    """

    def __init__(self, name: str, number: int, pool: WorkerPool, options: RewardOptions) -> None:
        self.name = name
        self._number = number
        self._pool = pool
        self._options = options

    in_background = True

    def begin(self, request: RewardRequest) -> "_Calls":
        """See :class:`colocate_rl.scoring.contract.RewardSource`."""
        return _Calls(self.name, self._number, self._pool, self._options, request)


class _Calls:
    def __init__(
        self, name: str, number: int, pool: WorkerPool, options: RewardOptions, request: RewardRequest
    ) -> None:
        self._name, self._number, self._pool, self._options = name, number, pool, options
        self._request = request
        self._state = _portable_state(request.helpers.get("trainer_state"))
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(request.groups):
            groups.setdefault(group, []).append(row)
        self._calls = [(rows, self._submit(rows)) for rows in groups.values()]

    def _submit(self, rows: Sequence[int]) -> "concurrent.futures.Future[Outcome]":
        arguments = self._request.rows(rows).arguments()
        return self._pool.submit(self._number, {**arguments, "trainer_state": self._state})

    def result(self) -> Scores:
        scores = Scores([math.nan] * len(self._request))
        extras: dict[str, list[Any]] = {}
        if self._options.on_error == "none":
            self._calls = [part for call in self._calls for part in self._apart_if_failed(*call)]
        for rows, future in self._calls:
            outcome = future.result()
            if isinstance(outcome, CallFailure):
                self._fail(rows, outcome, scores)
                continue
            for row, value in zip(rows, checked_values(self._name, outcome.values, len(rows)), strict=True):
                scores.values[row] = value
            self._log(rows, outcome, extras)
        for column, values in extras.items():
            self._request.helpers["log_extra"](column, values)
        return scores

    def _apart_if_failed(
        self, rows: list[int], future: "concurrent.futures.Future[Outcome]"
    ) -> "list[tuple[list[int], concurrent.futures.Future[Outcome]]]":
        if len(rows) == 1 or isinstance(future.result(), Answer):
            return [(rows, future)]
        return [([row], self._submit([row])) for row in rows]

    def _fail(self, rows: Sequence[int], failure: CallFailure, scores: Scores) -> None:
        if self._options.on_error == "none":
            scores.failures |= dict.fromkeys(rows, failure.reason)
            return
        trace = f"\n\nIn the worker:\n{failure.trace}" if failure.trace else ""
        raise RewardError(
            f"Reward function {self._name!r} failed on {len(rows)} completion(s) of one prompt: {failure.reason}. Mend "
            "it, raise reward_timeout_s if it is only slow, or set on_reward_error='none' to go on without those "
            f"rewards.{trace}"
        )

    def _log(self, rows: Sequence[int], answer: Answer, extras: dict[str, list[Any]]) -> None:
        for column, values in answer.extras.items():
            whole = extras.setdefault(column, [None] * len(self._request))
            for row, value in zip(rows, values, strict=True):
                whole[row] = value
        for name, value in answer.metrics:
            self._request.helpers["log_metric"](name, value)

    def cancel(self) -> None:
        for _, future in self._calls:
            future.cancel()
        if not all(future.done() for _, future in self._calls):
            self._pool.interrupt()


def _portable_state(state: Any) -> Any:
    """A trainer's state as a worker gets it: its plain figures, which need no transformers to be unpickled."""
    if not is_dataclass(state) or isinstance(state, type):
        return state
    figures: Mapping[str, Any] = {k: v for k, v in vars(state).items() if v is None or isinstance(v, int | float | str)}
    return SimpleNamespace(**figures)
