"""From token losses to the loss of a slice, by ``loss_type``; micro-batches of a slice add up to it.

Shape letters: B rows, T tokens. Sources: GRPO (Shao et al. 2024, arXiv 2402.03300), DAPO (Yu et al. 2025, 2503.14476),
Dr. GRPO (Liu et al. 2025, 2503.20783), LUSPO (2602.05261).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class SliceSize:
    """How large the whole slice is that a micro-batch belongs to, so that micro-batch losses add up to the slice's."""

    rows: int
    tokens: torch.Tensor
    """Scalar: tokens in the loss."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """What sums of token losses are divided by."""

    max_completion_length: int
    tokens_per_slice: float
    """Loss tokens of the generation batch over all ranks, divided by ranks and by slices (dapo)."""
    slice: SliceSize


def _mean_of_sequence_means(losses: torch.Tensor, mask: torch.Tensor, given: Denominators) -> torch.Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / given.slice.rows


def _mean_of_sequence_sums(losses: torch.Tensor, mask: torch.Tensor, given: Denominators) -> torch.Tensor:
    return (losses * mask).sum() / given.slice.rows


def _mean_of_tokens(losses: torch.Tensor, mask: torch.Tensor, given: Denominators) -> torch.Tensor:
    return (losses * mask).sum() / given.slice.tokens.clamp(min=1)


def _sum_over_budget(losses: torch.Tensor, mask: torch.Tensor, given: Denominators) -> torch.Tensor:
    return (losses * mask).sum() / (given.slice.rows * given.max_completion_length)


def _sum_over_batch_tokens(losses: torch.Tensor, mask: torch.Tensor, given: Denominators) -> torch.Tensor:
    return (losses * mask).sum() / max(given.tokens_per_slice, 1.0)


Aggregation = Callable[[torch.Tensor, torch.Tensor, Denominators], torch.Tensor]

AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": _mean_of_sequence_means,
    "bnpo": _mean_of_tokens,
    "dr_grpo": _sum_over_budget,
    "dapo": _sum_over_batch_tokens,
    "cispo": _sum_over_batch_tokens,
    "sapo": _mean_of_sequence_means,
    "luspo": _mean_of_sequence_sums,
    "vespo": _sum_over_batch_tokens,
}
"""One per ``loss_type``: token losses [B, T] and their mask to a scalar."""
Denominator = Literal["rows", "slice tokens", "batch tokens"]
_DIVIDES_BY: dict[Aggregation, Denominator] = {
    _mean_of_sequence_means: "rows",
    _mean_of_sequence_sums: "rows",
    _sum_over_budget: "rows",
    _mean_of_tokens: "slice tokens",
    _sum_over_batch_tokens: "batch tokens",
}
DENOMINATORS: dict[str, Denominator] = {name: _DIVIDES_BY[way] for name, way in AGGREGATIONS.items()}
"""What each of them divides by, beside what is known of a row alone: it decides when a row can be trained, and where.

``rows``: by a number that is fixed beforehand; ``batch tokens``: by one number for the whole generation batch. Rows of
these may be trained by any rank, in any order. ``slice tokens``: by the tokens of the slice on its rank.
"""
