"""What a token's loss is, by ``loss_type``, before corrections, KL and averaging. Shape letters: B rows, T tokens.

Sources: clipping, GRPO (Shao et al. 2024, arXiv 2402.03300), with two bounds of its own, DAPO (Yu et al. 2025,
2503.14476), and a bound on the unclipped side, INTELLECT-2 (2505.07291); CISPO, MiniMax-M1 (2506.13585); SAPO
(2511.20347); VESPO (2602.10693).
"""

import math
from dataclasses import dataclass

import torch

LEAST_LOG_WEIGHT = math.log(1e-8)
"""VESPO: smallest log of a sequence's weight, as in TRL."""
LARGEST_LOG_WEIGHT = 20.0
"""VESPO: the largest; also of each token's log-ratio, either way."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """The shape of VESPO's weight w^k exp(lambda (1 - w)) of a sequence's importance weight w; 1 where w is 1."""

    k: float
    """Power: how quickly the weight falls where w is below 1."""
    rate: float
    """Lambda: how quickly it falls where w is above 1."""


GAMMA_POSITIVE = Gamma(k=2.0, rate=3.0)
"""Default for advantages of at least 0."""
GAMMA_NEGATIVE = Gamma(k=3.0, rate=2.0)
"""Default for the others."""


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, epsilon: float, epsilon_high: float, delta: float | None
) -> torch.Tensor:
    """Per-token -min(min(c, delta) A, clip(c, 1 - epsilon, 1 + epsilon_high) A).

    Args:
        ratio: c, [B, T] or [B, 1].
        advantages: [B].
        epsilon: lower clip range.
        epsilon_high: upper clip range.
        delta: upper bound of the unclipped ratio, or None.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    weights = advantages[:, None]
    return -torch.minimum(bounded * weights, clipped * weights)


def cispo_surrogate(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, *, epsilon_high: float
) -> torch.Tensor:
    """Per-token -min(c, epsilon_high) A log p, the factor before log p without gradient: no token is ever dropped.

    Args:
        ratio: c, [B, T] or [B, 1].
        logprobs: [B, T], live.
        advantages: [B].
        epsilon_high: the cap itself (not added to 1).
    """
    return -ratio.detach().clamp(max=epsilon_high) * advantages[:, None] * logprobs


def sapo_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, temperature_pos: float, temperature_neg: float
) -> torch.Tensor:
    """Per-token -A sigmoid(tau (c - 1)) 4 / tau: a soft gate whose slope at c = 1 is 1, as without any clipping.

    Args:
        ratio: c, [B, T] or [B, 1].
        advantages: [B].
        temperature_pos: tau where the advantage is above 0.
        temperature_neg: tau elsewhere.
    """
    weights = advantages[:, None]
    tau = _by_sign(weights > 0, weights, temperature_pos, temperature_neg)
    return -weights * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def _by_sign(gains: torch.Tensor, like: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """One of two numbers by row, in the precision of ``like``."""
    return torch.where(gains, torch.full_like(like, positive), torch.full_like(like, negative))


@torch.no_grad()
def gamma_weights(
    log_ratios: torch.Tensor,
    correction: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    positive: Gamma,
    negative: Gamma,
) -> torch.Tensor:
    """VESPO's weight phi of each sequence, by its importance weight w = policy / engine (product over its tokens).

    Args:
        log_ratios: [B, T], policy over old.
        correction: [B, T], old over engine, bounded; None: taken as 1.
        advantages: [B].
        mask: bool [B, T].
        positive: shape for advantages of at least 0.
        negative: shape for the others.

    Returns:
        [B, 1], without gradient.
    """
    total = (log_ratios.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT) * mask).sum(-1, keepdim=True)
    if correction is not None:
        logs = correction.log().clamp(LEAST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        total = total + (logs * mask).sum(-1, keepdim=True)
    log_weight = total.clamp(LEAST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    gains = advantages[:, None] >= 0
    k = _by_sign(gains, log_weight, positive.k, negative.k)
    rate = _by_sign(gains, log_weight, positive.rate, negative.rate).clamp(min=1e-4)
    return (rate + k * log_weight - rate * log_weight.exp()).exp()


def vespo_surrogate(phi: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Per-token -phi A log p.

    Args:
        phi: [B, 1], see :func:`gamma_weights`.
        logprobs: [B, T], live.
        advantages: [B].
    """
    return -phi * advantages[:, None] * logprobs
