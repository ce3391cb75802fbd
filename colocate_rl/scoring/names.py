"""Reward functions by name, for the command line."""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from colocate_rl import rewards
from colocate_rl.errors import ConfigError
from colocate_rl.scoring.contract import RewardFunction


def resolve_reward(path: str) -> RewardFunction:
    """Finds a reward function by name; the working directory is searched too.

    Args:
        path: a ready one (``accuracy_reward``), ``package.module:function`` or TRL's ``package.module.function``. One
            that is made by a function is written as its call with plain values:
            ``get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)``.

    Raises:
        ConfigError: when the form is wrong, the module is missing or has no such callable.
    """
    name, parenthesis, _ = path.partition("(")
    found = _find(name.strip())
    if parenthesis:
        return _made(path, found, _literal_arguments(path))
    if getattr(rewards, name, None) is found and name.startswith("get_"):
        raise ConfigError(f"{name} makes a reward function. Write its call: '{name}{_parameters(found)}'.")
    return found


def _find(name: str) -> RewardFunction:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    if attribute in rewards.__all__ and not colon and module_name in ("", "trl.rewards", rewards.__name__):
        ready: RewardFunction = getattr(rewards, attribute)
        return ready
    if not (module_name and attribute) or attribute == "py":  # the last: a file's name is not a module's
        raise ConfigError(
            f"Reward function {name!r} is not of the form package.module:function, and none of the ready ones: "
            f"{', '.join(rewards.__all__)}."
        )
    return _imported(name, module_name, attribute)


def _imported(name: str, module_name: str, attribute: str) -> RewardFunction:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module exists; one that it imports does not
        raise ConfigError(
            f"Reward function {name!r}: there is no module {module_name!r} in the working directory or the "
            "environment. Check --reward-funcs."
        ) from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        public = sorted(name for name in vars(importlib.import_module(module_name)) if not name.startswith("_"))
        raise ConfigError(
            f"Reward function {name!r}: module {module_name!r} has no function {attribute!r}. It has: "
            f"{', '.join(public[:20])}."
        )
    function: RewardFunction = found
    return function


def _literal_arguments(path: str) -> dict[str, Any]:
    """The keyword arguments of a call written in ``path``; nothing of it is executed."""
    try:
        call: Any = ast.parse("f(" + path.partition("(")[2], mode="eval").body
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        named = {None: None}
    if None in named or call.args:
        raise ConfigError(
            f"Reward function {path!r} is no call with named plain values, such as "
            "'get_repetition_penalty_reward(ngram_size=3)'. Quote it for the shell."
        )
    return named


def _made(path: str, maker: RewardFunction, arguments: dict[str, Any]) -> RewardFunction:
    try:
        inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"Reward function {path!r}: {error}. Its arguments: {_parameters(maker)}.") from None
    made: Any = maker(**arguments)
    if not callable(made):
        raise ConfigError(f"Reward function {path!r} made {type(made).__name__}, which cannot be called.")
    function: RewardFunction = made
    return function


def _parameters(function: RewardFunction) -> str:
    return "(" + ", ".join(str(p).replace("'", "") for p in inspect.signature(function).parameters.values()) + ")"
