"""Probability ratios and what is made of them: KL, the correction for the engine's numerics, the off-policy mask.

Shape letters: B rows, T tokens; column t is about token t. Sources: GSPO (Zheng et al. 2025, arXiv 2507.18071) for the
sequence level; k3 estimate of the KL (Schulman, "Approximating KL divergence"); off-policy sequence masking
(DeepSeek-V3.2, 2512.02556, equation 9).
"""

import torch


def log_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Log of the probability ratio: per token [B, T], or the mean over each sequence's masked tokens [B, 1] (GSPO)."""
    difference = (new - old) * mask
    if level == "token":
        return difference
    return difference.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


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


def off_policy_mask(
    policy: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Which rows stay in the policy loss: those not to be unlearned, and those still likely under the policy.

    A row with a negative advantage whose mean of (sampling - policy) log-probabilities, an estimate of
    KL(engine || policy), is above ``threshold`` says little about the policy of now, and leaves.

    Args:
        policy: float32 [B, T], live.
        sampling: float32 [B, T], the engine's; NaN (unknown) counts as no difference.
        mask: bool [B, T].
        advantages: float32 [B].
        threshold: in nats per token.

    Returns:
        bool [B, 1], True: stays.
    """
    difference = ((sampling - policy.detach()) * mask).nan_to_num(nan=0.0)
    divergence = difference.sum(-1) / mask.sum(-1).clamp(min=1)
    return ((advantages >= 0) | (divergence <= threshold))[:, None]
