"""Adding two numbers of two digits: problems, their split and the reward.

Everything follows from a seed. A problem and its mirror image (57+68 and 68+57) always fall into the same split, so a
held-out problem was seen neither in the warm start nor in training, in either order. The module imports nothing heavy:
the command line names the reward as ``examples.addition.task:correct_sum``.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

SMALLEST, LARGEST = 10, 99
NUM_WARM_START_PAIRS = 2200
NUM_HELD_OUT_PAIRS = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum, for instance ``Problem(57, 68)``: prompt ``57+68=``, answer ``125``."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The text the model is given."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The one right completion."""
        return str(self.left + self.right)

    @property
    def row(self) -> dict[str, str]:
        """The data set row: the trainer reads ``prompt`` and hands ``answer`` to the reward."""
        return {"prompt": self.prompt, "answer": self.answer}


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint problems for the three uses; no problem's mirror image is in another split."""

    warm_start: tuple[Problem, ...]
    """What the tiny model imitates before any reinforcement, both orders of a pair."""
    train: tuple[Problem, ...]
    """What GRPO samples from, both orders of a pair."""
    held_out: tuple[Problem, ...]
    """What accuracy is measured on, one order of a pair, chosen at random."""


def make_splits(seed: int) -> Splits:
    """Deal all 4095 unordered pairs of two-digit numbers into the three splits."""
    generator = random.Random(f"addition-{seed}")
    pairs = list(combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    generator.shuffle(pairs)
    held_out = [Problem(*generator.sample(pair, 2)) for pair in pairs[:NUM_HELD_OUT_PAIRS]]
    end = NUM_HELD_OUT_PAIRS + NUM_WARM_START_PAIRS
    return Splits(
        warm_start=_both_orders(pairs[NUM_HELD_OUT_PAIRS:end], generator),
        train=_both_orders(pairs[end:], generator),
        held_out=tuple(held_out),
    )


def _both_orders(pairs: Sequence[tuple[int, int]], generator: random.Random) -> tuple[Problem, ...]:
    problems = sorted(
        {problem for a, b in pairs for problem in (Problem(a, b), Problem(b, a))},
        key=lambda problem: (problem.left, problem.right),
    )
    generator.shuffle(problems)
    return tuple(problems)


def write_jsonl(problems: Iterable[Problem], path: Path) -> None:
    """Write one ``{"prompt": "57+68=", "answer": "125"}`` per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(problem.row) + "\n" for problem in problems), "utf-8")


def correct_sum(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward 1.0 for exactly the right number and 0.0 for anything else.

    Args:
        completions: What the model wrote, without special tokens.
        answer: The data set's column of right answers, one for each completion.
        **kwargs: The trainer's other columns and facts, not needed here.

    Returns:
        One reward for each completion, in order.
    """
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
