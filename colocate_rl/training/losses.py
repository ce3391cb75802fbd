"""The GRPO family of losses as small pure functions. Shape letters: B rows, T tokens.

Per-token tensors follow :mod:`colocate_rl.rollout.records`: column t is about token t. Formulas: GRPO (Shao et al.
2024,
arXiv 2402.03300), DAPO (Yu et al. 2025, 2503.14476), Dr. GRPO (Liu et al. 2025, 2503.20783), GSPO (Zheng et al. 2025,
2507.18071), two-sided clipping (INTELLECT-2, 2505.07291), k3 estimate of the KL (Schulman, "Approximating KL
divergence").
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The part of the configuration that losses read; see :class:`colocate_rl.options.GRPOOptions`."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_completion_length: int = 512
    correction: bool = True
    correction_mode: str = "sequence_mask"
    correction_clip_max: float | None = 3.0
    correction_clip_min: float | None = None


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss is computed from."""

    policy_logprobs: torch.Tensor
    """float32 [B, T], with gradient."""
    old_logprobs: torch.Tensor
    """float32 [B, T], detached."""
    sampling_logprobs: torch.Tensor
    """float32 [B, T]."""
    ref_logprobs: torch.Tensor | None
    """float32 [B, T]; needed when beta is not 0."""
    mask: torch.Tensor
    """bool [B, T]: tokens in the loss."""
    advantages: torch.Tensor
    """float32 [B]."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and the per-token tensors that metrics are made of (all detached but the loss)."""

    loss: torch.Tensor
    """Scalar, before the division by accumulation steps: this micro-batch's part of its slice's loss."""
    ratio: torch.Tensor
    """float32 [B, T] or [B, 1]: policy over old."""
    kl: torch.Tensor | None
    """float32 [B, T]: k3 estimate against the reference."""
    correction: torch.Tensor | None
    """float32 [B, T] or [B, 1]: weight applied for the engine's other numerics."""


def log_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Log of the probability ratio: per token [B, T], or the mean over each sequence's masked tokens [B, 1] (GSPO)."""
    difference = (new - old) * mask
    if level == "token":
        return difference
    return difference.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, epsilon: float, epsilon_high: float, delta: float | None
) -> torch.Tensor:
    """Per-token -min(min(c, delta) A, clip(c, 1 - epsilon, 1 + epsilon_high) A).

    Args:
        ratio: [B, T] or [B, 1].
        advantages: [B].
        epsilon: lower clip range.
        epsilon_high: upper clip range.
        delta: upper bound of the unclipped ratio, or None.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    weights = advantages[:, None]
    return -torch.minimum(bounded * weights, clipped * weights)


def kl_k3(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Per-token estimate exp(d) - d - 1 of KL(policy || reference), d = reference - policy; 0 outside the mask."""
    difference = (reference - policy) * mask
    return difference.exp() - difference - 1


def sampling_correction(
    old: torch.Tensor,
    sampling: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    clip_max: float | None,
    clip_min: float | None,
) -> torch.Tensor:
    """Importance weight policy / engine for tokens that the engine sampled.

    Args:
        old: float32 [B, T], the policy's log-probabilities at rollout time.
        sampling: float32 [B, T], the engine's.
        mask: bool [B, T].
        mode: ``token_*`` weighs each token by exp(d), ``sequence_*`` each row by exp(sum of d); ``*_truncate`` clamps
            the weight to the bounds, ``*_mask`` sets it to 0 outside them.
        clip_max: upper bound, or None.
        clip_min: lower bound, or None.

    Returns:
        float32 [B, T] or [B, 1], without gradient.
    """
    difference = ((old - sampling) * mask).nan_to_num(nan=0.0).detach()
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=clip_min, max=clip_max)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_max is not None:
        outside |= ratio > clip_max
    if clip_min is not None:
        outside |= ratio < clip_min
    return ratio.masked_fill(outside, 0.0)


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
}
"""One per ``loss_type``: token losses [B, T] and their mask to a scalar."""
Denominator = Literal["rows", "slice tokens", "batch tokens"]
DENOMINATORS: dict[str, Denominator] = {
    "grpo": "rows",
    "bnpo": "slice tokens",
    "dr_grpo": "rows",
    "dapo": "batch tokens",
}
"""What each of them divides by, beside what is known of a row alone: it decides when a row can be trained, and where.

``rows``: by a number that is fixed beforehand; ``batch tokens``: by one number for the whole generation batch. Rows of
these may be trained by any rank, in any order. ``slice tokens``: by the tokens of the slice on its rank.
"""


def grpo_loss(
    inputs: LossInputs, settings: LossSettings, tokens_per_slice: float, whole: SliceSize | None = None
) -> LossOutput:
    """The loss of one micro-batch, as its part of the loss of the slice that it belongs to.

    Per token: (clipped surrogate) x (sampling correction) + beta x KL [x ratio], then averaged by ``loss_type``.

    Args:
        inputs: log-probabilities, advantages and mask of the micro-batch.
        settings: see :class:`LossSettings`.
        tokens_per_slice: loss tokens of the generation batch over all ranks / ranks / slices.
        whole: size of the slice; None: the micro-batch is all of it.
    """
    mask = inputs.mask
    level = settings.importance_sampling_level
    ratio = log_ratio(inputs.policy_logprobs, inputs.old_logprobs, mask, level).exp()
    losses = clipped_surrogate(
        ratio,
        inputs.advantages,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        delta=settings.delta,
    ).expand_as(inputs.policy_logprobs)
    weights = None
    if settings.correction:
        weights = sampling_correction(
            inputs.old_logprobs,
            inputs.sampling_logprobs,
            mask,
            mode=settings.correction_mode,
            clip_max=settings.correction_clip_max,
            clip_min=settings.correction_clip_min,
        )
        losses = losses * weights
    kl = None
    if settings.beta != 0.0:
        assert inputs.ref_logprobs is not None
        kl = kl_k3(inputs.policy_logprobs, inputs.ref_logprobs, mask)
        losses = losses + settings.beta * (kl * ratio if settings.use_bias_correction_kl else kl)
        kl = kl.detach()
    if whole is None:
        whole = SliceSize(mask.shape[0], mask.sum())
    denominators = Denominators(settings.max_completion_length, tokens_per_slice, whole)
    loss = AGGREGATIONS[settings.loss_type](losses, mask, denominators)
    return LossOutput(loss, ratio.detach(), kl, weights)
