"""Rewards for the right mathematical answer, checked by math-verify (an optional package)."""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from colocate_rl.errors import ConfigError
from colocate_rl.rewards.text import completion_text

PARSE_TIMEOUT_S = 10
VERIFY_TIMEOUT_S = 5
"""math-verify's own limits for one completion; they need the main thread (of the rank, or of a reward worker)."""


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where a completion's LaTeX answer (``\boxed{}`` first) equals the row's solution mathematically, else 0.0.

    Args:
        completions: strings, or lists of messages.
        solution: column of the data set: text that holds the right answer.
        log_extra: receives what was read from both.
        kwargs: ignored.

    Returns:
        One number per completion; None where the solution itself cannot be read.

    Raises:
        ConfigError: without math-verify.
    """
    return _judge([completion_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] = ("</think>",),
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """:func:`accuracy_reward` of what follows the reasoning; 0.0 for reasoning that does not end.

    Args:
        completions: strings, or lists of messages.
        solution: as there.
        reasoning_delimiters: the first of these that a completion holds ends its reasoning, at its last occurrence.
        log_extra: as there.
        kwargs: ignored.
    """
    answers = [_after_reasoning(completion_text(completion), reasoning_delimiters) for completion in completions]
    rewards = _judge(["" if answer is None else answer for answer in answers], solution, log_extra)
    return [0.0 if answer is None else reward for answer, reward in zip(answers, rewards, strict=True)]


def _after_reasoning(text: str, delimiters: Sequence[str]) -> str | None:
    known = next((delimiter for delimiter in delimiters if delimiter in text), None)
    return None if known is None else text.rpartition(known)[2]


def _judge(
    texts: Sequence[str], solutions: Sequence[str], log_extra: Callable[[str, list[Any]], None] | None
) -> list[float | None]:
    judge = _math_judge()
    verdicts = [judge(text, solution) for text, solution in zip(texts, solutions, strict=True)]
    if log_extra is not None:
        log_extra("solution", list(solutions))
        log_extra("gold_parsed", [gold for _, gold, _ in verdicts])
        log_extra("answer_parsed", [answer for _, _, answer in verdicts])
    return [reward for reward, _, _ in verdicts]


@functools.cache
def _math_judge() -> Callable[[str, str], tuple[float | None, str, str]]:
    """Compares a text with a solution: the reward, and what was read from solution and text."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Rewards for mathematical answers need the package math-verify, but {error.name} is not installed. "
            'Install it: pip install "colocate-rl[math]".'
        ) from None
    formula = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def judge(text: str, solution: str) -> tuple[float | None, str, str]:
        timed = threading.current_thread() is threading.main_thread()  # its timeouts are signals
        limits = {"parsing_timeout": PARSE_TIMEOUT_S if timed else None}
        gold = parse(solution, **limits)
        if not gold:
            return None, "", ""
        answer = parse(text, extraction_config=[formula], extraction_mode="first_match", **limits)
        right = bool(answer) and verify(gold, answer, timeout_seconds=VERIFY_TIMEOUT_S if timed else None)
        return float(right), str(gold), str(answer)

    return judge


@dataclass(frozen=True, slots=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__: ClassVar[str] = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        verdicts = accuracy_reward(completions, solution)
        return [
            None if right is None else self._scaled(right == 1.0, len(ids))
            for right, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, right: bool, length: int) -> float:
        shortest, longest = (
            (self.max_value_correct, self.min_value_correct) if right else (self.min_value_wrong, self.max_value_wrong)
        )
        progress = min(length / self.max_len, 1.0)  # the cosine would rise again beyond
        return longest + (shortest - longest) * (1 + math.cos(math.pi * progress)) / 2


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> _CosineScaledReward:
    """:func:`accuracy_reward` scaled by length along half a cosine (Yeo et al. 2025, arXiv:2502.03373, appendix C.1).

    Right answers earn the more the shorter they are, wrong ones lose the less the longer they are.

    Args:
        max_len: tokens from which a completion counts as longest.
        min_value_wrong: of a wrong completion without tokens.
        max_value_wrong: of a wrong completion of ``max_len`` tokens.
        min_value_correct: of a right completion of ``max_len`` tokens.
        max_value_correct: of a right completion without tokens.

    Raises:
        ConfigError: for a length below 1.
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len} is the longest completion's tokens; it must be at least 1.")
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
