"""Calling reward functions and holding them to their contract."""

import copy
import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colocate_rl.errors import ConfigError, RewardError

RewardFunction = Callable[..., Sequence[float | None]]


def resolve_reward(path: str) -> RewardFunction:
    """Imports a reward function named as ``package.module:function``; the working directory is searched too.

    Raises:
        ConfigError: when the form is wrong, the module is missing or has no such callable.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(f"Reward function {path!r} is not of the form package.module:function.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module exists; one that it imports does not
        raise ConfigError(
            f"Reward function {path!r}: there is no module {module_name!r} in the working directory or the "
            "environment. Check --reward-funcs."
        ) from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        public = sorted(name for name in vars(importlib.import_module(module_name)) if not name.startswith("_"))
        raise ConfigError(
            f"Reward function {path!r}: module {module_name!r} has no function {attribute!r}. It has: "
            f"{', '.join(public[:20])}."
        )
    function: RewardFunction = found
    return function


def reward_name(function: Any) -> str:
    """The name that logs use: the function's own, looking through ``functools.partial``, else its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


class Rewards:
    """Several reward functions as one table of rewards.

    Args:
        functions: each called with keywords only: ``prompts``, ``completions``, ``completion_ids``, every further
            column, ``trainer_state``, ``log_extra``, ``log_metric``; each returns one float or None per completion.
        weights: one per function; None: all 1.0.

    Raises:
        ConfigError: when there is no function, or the number of weights differs.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise ConfigError("No reward source provided: pass at least one function as reward_funcs.")
        for function in functions:
            if isinstance(function, nn.Module) or not callable(function):
                raise ConfigError(
                    f"reward_funcs holds {function!r} of type {type(function).__name__}; reward models and names of "
                    "models are not supported yet, only functions."
                )
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(weights)} value(s) but there are {len(functions)} reward function(s); their "
                "numbers must match."
            )
        self.functions = list(functions)
        self.names = _unique([reward_name(function) for function in functions])
        self.weights = torch.tensor(list(weights) if weights is not None else [1.0] * len(functions))

    def score(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        **helpers: Any,
    ) -> torch.Tensor:
        """Calls every function on this rank's completions.

        Args:
            prompts: one per completion, as the data set has it.
            completions: text, or a list of messages, per completion.
            completion_ids: sampled ids per completion.
            columns: the data set's other columns, one value per completion.
            helpers: trainer_state, log_extra and log_metric.

        Returns:
            float32 [n, F]; NaN where a function returned None.

        Raises:
            RewardError: for a wrong number of values, or one that is no finite number.
        """
        table = torch.full((len(prompts), len(self.functions)), torch.nan)
        if not prompts:
            return table
        for number, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            values = function(
                prompts=list(prompts),
                completions=copy.deepcopy(completions),  # what one function changes, the next must not see
                completion_ids=[list(ids) for ids in completion_ids],
                **{column: list(values) for column, values in columns.items()},
                **helpers,
            )
            table[:, number] = torch.tensor(_checked(name, values, len(prompts)))
        return table


def _unique(names: Sequence[str]) -> list[str]:
    """Numbers repeated names, so that no function's figures hide another's."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique


def _checked(name: str, values: Any, expected: int) -> list[float]:
    if isinstance(values, torch.Tensor):
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
    except (TypeError, ValueError):
        raise RewardError(
            f"Reward function {name!r} returned {value!r} for row {row} (of this rank's completions), which is "
            f"not a number."
        ) from None
    if not math.isfinite(number):
        raise RewardError(
            f"Reward function {name!r} returned {number} for row {row} (of this rank's completions). A non-finite "
            "reward would spoil its whole group; return None for a completion that cannot be scored."
        )
    return number
