"""Rewards that look at a completion's form and length, not at its answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from colocate_rl.errors import ConfigError
from colocate_rl.rewards.text import completion_text

_ONE_THOUGHT = re.compile(r"<think>(?:(?!<think>).)*</think>(?:(?!<think>).)*", re.DOTALL)


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """1.0 for a completion that starts with ``<think>``, closes it, and opens no other; else 0.0.

    Args:
        completions: strings, or lists of messages.
        kwargs: ignored.
    """
    return [float(_ONE_THOUGHT.fullmatch(completion_text(completion)) is not None) for completion in completions]


@dataclass(frozen=True, slots=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int
    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        if length > self.max_completion_len:
            return -1.0
        beyond = length - (self.max_completion_len - self.soft_punish_cache)
        return -beyond / self.soft_punish_cache if beyond > 0 else 0.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> _SoftOverlongPunishment:
    """A reward that falls from 0 to -1 over the last tokens before a length limit (DAPO, arXiv:2503.14476, eq. 13).

    With L the completion's tokens: 0 up to max - cache, then (max - cache - L) / cache, and -1 beyond max.

    Args:
        max_completion_len: tokens from which the whole punishment applies.
        soft_punish_cache: tokens before it over which the punishment grows; 0: none.

    Raises:
        ConfigError: when the cache does not fit into the limit.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache={soft_punish_cache} tokens are the end of max_completion_len={max_completion_len}, so "
            "they must be between 0 and that."
        )
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True, slots=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float
    __name__: ClassVar[str] = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[start : start + self.ngram_size]) for start in range(len(ids) - self.ngram_size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return self.max_penalty * repeated / len(ngrams) if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> _RepetitionPenalty:
    """A penalty for repeating oneself (Yeo et al. 2025, arXiv:2502.03373, appendix C.2).

    ``max_penalty`` times the share of n-grams of token ids that occurred before: 0.0 without repetition, and for
    completions shorter than one n-gram.

    Args:
        ngram_size: tokens of an n-gram.
        max_penalty: approached by a completion that says one thing over and over; at most 0.

    Raises:
        ConfigError: for an n-gram of no tokens, or a penalty that would be a prize.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise ConfigError(f"ngram_size={ngram_size} must be at least 1, and max_penalty={max_penalty} at most 0.")
    return _RepetitionPenalty(ngram_size, max_penalty)
