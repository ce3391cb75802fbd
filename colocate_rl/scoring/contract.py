"""What a reward source is asked, what it may answer, and how a breach is reported."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from colocate_rl.errors import RewardError

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """What happens around a call of a reward function."""

    num_workers: int = 0
    """Processes per rank that functions run in; 0: in the rank itself."""
    timeout_s: float | None = None
    """Most seconds for one call of a function in a worker, or of a coroutine function."""
    on_error: str = "raise"
    """"none": completions whose call failed get no reward from that function."""


HELPERS = ("trainer_state", "log_extra", "log_metric")
"""What a reward function is given beside lists with one entry per completion."""


def passed_columns(names: Iterable[str]) -> list[str]:
    """Columns of a data set that reward functions get: as in TRL, none whose name is taken by what is sampled."""
    return [name for name in names if name not in ("prompt", "completion", "completion_ids")]


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """This rank's completions of a rollout; every list has one entry per completion."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]]
    groups: list[int]
    """Rows with the same number are completions of one prompt."""
    helpers: Mapping[str, Any] = field(default_factory=dict)
    """trainer_state, log_extra and log_metric."""

    def __len__(self) -> int:
        return len(self.prompts)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of one call: what one function changes in its lists, the next must not see."""
        return {
            "prompts": list(self.prompts),
            "completions": copy.deepcopy(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
            **{column: list(values) for column, values in self.columns.items()},
            **self.helpers,
        }

    def rows(self, chosen: Sequence[int]) -> "RewardRequest":
        """The chosen rows, without the helpers."""
        return RewardRequest(
            [self.prompts[row] for row in chosen],
            [self.completions[row] for row in chosen],
            [self.completion_ids[row] for row in chosen],
            {column: [values[row] for row in chosen] for column, values in self.columns.items()},
            [self.groups[row] for row in chosen],
        )


@dataclass(slots=True)
class Scores:
    """One source's answer: a value per completion, NaN for None, and what went wrong on the way."""

    values: list[float]
    failures: dict[int, str] = field(default_factory=dict)
    """Row to what happened to its call, where ``on_error`` is "none"."""


class PendingScores(Protocol):
    """An answer under way."""

    def result(self) -> Scores:
        """Waits for it.

        Raises:
            RewardError: for a breach of the contract, or a failed call where ``on_error`` is "raise".
        """
        ...

    def cancel(self) -> None:
        """Gives up what has not been answered yet; may be called after :meth:`result`."""
        ...


class OnDemand:
    """An answer that is made in the rank when it is asked for.

    Args:
        make: the answer.
    """

    def __init__(self, make: Callable[[], Scores]) -> None:
        self._make = make

    def result(self) -> Scores:
        """See :class:`PendingScores`."""
        return self._make()

    def cancel(self) -> None:
        """It has not begun, or is over."""


class RewardSource(Protocol):
    """Something that gives completions a number each."""

    name: str
    in_background: bool
    """True when scoring goes on after :meth:`begin`; False when it is done by ``result``."""

    def begin(self, request: RewardRequest) -> PendingScores:
        """Starts scoring."""
        ...


def reward_name(function: Any) -> str:
    """The name that logs use: a model's last path part, a function's own (through partials), else its class's."""
    if isinstance(function, str):
        return function.rstrip("/").rpartition("/")[2]
    while isinstance(function, functools.partial):
        function = function.func
    path = getattr(getattr(function, "config", None), "_name_or_path", "")
    if isinstance(function, torch.nn.Module) and path:
        return reward_name(path)
    return getattr(function, "__name__", None) or type(function).__name__


def unique_names(names: Sequence[str]) -> list[str]:
    """Numbers repeated names, so that no function's figures hide another's."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique


def checked_values(name: str, values: Any, expected: int) -> list[float]:
    """A function's answer as numbers, NaN for None.

    Raises:
        RewardError: for a wrong number of values, or one that is no finite number.
    """
    if isinstance(values, torch.Tensor) or getattr(values, "ndim", 1) == 0:  # numpy's lone number has a length too
        values = values.tolist()
    if values is None or isinstance(values, str | bytes | Mapping | set | frozenset) or not hasattr(values, "__len__"):
        raise RewardError(
            f"Reward function {name!r} returned {type(values).__name__} instead of a list with one number (or None) "
            f"for each of {expected} completions."
        )
    if len(values) != expected:
        raise RewardError(
            f"Reward function {name!r} returned {len(values)} value(s) for {expected} completions. It must return one "
            "number (or None) per completion, in order."
        )
    return [_checked_value(name, row, value) for row, value in enumerate(values)]


def _checked_value(name: str, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise RewardError(
            f"Reward function {name!r} returned {value!r} for row {row} (of this rank's completions), which is "
            f"not a number."
        ) from None
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise RewardError(
            f"Reward function {name!r} returned {number} for row {row} (of this rank's completions). A "
            "reward that is not finite (in float32) would spoil its whole group; return None for a completion that "
            "cannot be scored."
        )
    return number


def all_failed(num_rows: int, reason: str) -> Scores:
    """No reward for any row, all for one reason."""
    return Scores([math.nan] * num_rows, dict.fromkeys(range(num_rows), reason))
