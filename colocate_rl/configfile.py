"""``--config file.yaml``: settings from a file, as the words that a command line would have had."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from colocate_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a file sets."""

    words: list[str]
    """Flags and values, for an argument parser; put before the user's own words, they lose to them."""
    unset: list[str]
    """Names of settings that are null: None has no spelling on a command line."""


def read_settings(path: str, switches: Collection[str]) -> FileSettings:
    """Reads a YAML (or JSON) file of settings: names as on the command line, with dashes or underscores.

    Args:
        path: of the file.
        switches: flags without a value, which are there or not.

    Raises:
        ConfigError: when there is no such file, or it is no mapping of names to values.
    """
    file = Path(path).expanduser()
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path!r} could not be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path!r} is no text in UTF-8 ({error}). Save it as such.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path!r} is no valid YAML: {error}") from None
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"--config {path!r} must hold one mapping of names to values, such as 'beta: 0.04'.")
    given = {name.replace("-", "_"): value for name, value in found.items()}
    if "config" in given:
        raise ConfigError(f"--config {path!r} names another file ('config'). Settings come from one file.")
    words: list[str] = []
    for name, value in given.items():
        words += _words(name, value, is_switch=name in switches)
    return FileSettings(words, [name for name, value in given.items() if value is None])


def _words(name: str, value: Any, *, is_switch: bool) -> list[str]:
    flag = f"--{name}"
    if value is None or (is_switch and not value):
        return []
    if is_switch:
        return [flag]
    if value is False and name.endswith("_strategy"):
        value = "no"  # what the word means in YAML 1.1, unless it is quoted
    if isinstance(value, Mapping):
        return [f"{flag}={json.dumps(value)}"]
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    if name == "vllm_devices":
        return [f"{flag}={','.join(map(str, value))}"]
    return [flag, *map(str, value)]
