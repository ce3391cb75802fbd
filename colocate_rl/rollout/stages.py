"""What a rollout is between its stages: this rank's rows answered, rated, and compared with others of their group."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from colocate_rl.engine.protocol import Completion
from colocate_rl.rollout.records import EngineStats

Row = Mapping[str, Any]


def numbered_copies(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Prompt index and copy of all ranks' rows, from their prompt indices in the order of ranks and rows."""
    counts: dict[int, itertools.count[int]] = {}
    return [(index, next(counts.setdefault(index, itertools.count()))) for index in indices]


def joined_columns(parts: Sequence[Mapping[str, list[Any]]], sizes: Sequence[int]) -> dict[str, list[Any]]:
    """Columns one behind another; of a part that lacks one, as many None as it has rows (``sizes``)."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: [value for part, size in zip(parts, sizes, strict=True) for value in part.get(name, [None] * size)]
        for name in names
    }


@dataclass(frozen=True, slots=True)
class Answered:
    """This rank's rows with their completions; one entry per row in each list but ``stats``."""

    rows: list[Row]
    prompt_ids: list[tuple[int, ...]]
    completions: list[Completion]
    stats: list[EngineStats]
    """One record per engine and call."""
    texts: list[Any] | None = None
    """What reward functions see, where it is more than the decoded completions: dialogues."""
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """Further arguments of the reward functions."""
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Further figures for the log: this rank's numerator and denominator."""
    places: list[int] = field(default_factory=list)
    """Of the rows among all rows of this rank's generation batch, where they are not all of them."""
    prompts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Token ids of all ranks' prompts, by index; empty where completions are no longer the engines' first answers."""
    everyone: Mapping[tuple[int, int], Completion] = field(default_factory=dict)
    """All ranks' completions, by prompt index and copy; see :func:`numbered_copies`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of this rank that the engines have answered once."""

    answered: Answered
    copies: list[int]
    """Of each row: which copy of its prompt it is, counted over all ranks."""
    policy_version: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Rated:
    """Answered rows with their rewards, not compared with each other yet; one entry per row in each list."""

    answered: Answered
    texts: list[Any]
    """What reward functions saw: strings, or lists of messages."""
    rewards: torch.Tensor
    """float32 [n, F], NaN for None."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that reward functions added with ``log_extra``."""


@dataclass(slots=True)
class Scored:
    """This rank's rows of one rollout; one entry per row in each list."""

    rows: list[Row]
    prompt_ids: list[tuple[int, ...]]
    completions: list[Completion]
    texts: list[Any]
    """What reward functions saw: strings, or lists of messages."""
    rewards: torch.Tensor
    """float32 [n, F], NaN for None."""
    advantages: torch.Tensor
    """float32 [n]."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that reward functions added with ``log_extra``."""

    @classmethod
    def joined(cls, parts: Sequence["Scored"]) -> "Scored":
        """The rows of all parts; None where a part lacks an extra column."""
        return cls(
            [row for part in parts for row in part.rows],
            [ids for part in parts for ids in part.prompt_ids],
            [completion for part in parts for completion in part.completions],
            [text for part in parts for text in part.texts],
            torch.cat([part.rewards for part in parts]),
            torch.cat([part.advantages for part in parts]),
            joined_columns([part.extras for part in parts], [len(part.rows) for part in parts]),
        )
