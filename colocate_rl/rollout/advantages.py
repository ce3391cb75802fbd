"""Rewards to advantages: small pure functions. Shape letters: P prompts, G completions of each, F reward functions."""

from dataclasses import dataclass

import torch

STD_EPSILON = 1e-4
"""Added to the standard deviation that divides advantages, as in TRL."""
NO_SPREAD = 1e-8
"""A group whose rewards have a smaller standard deviation has nothing to compare."""


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Advantages of a generation batch with the figures that are logged beside them."""

    rewards: torch.Tensor
    """float32 [P, G]: weighted sum; NaN where every function returned None."""
    advantages: torch.Tensor
    """float32 [P, G]: 0 where the reward is NaN."""
    group_std: torch.Tensor
    """float32 [P]: unbiased standard deviation of each group's rewards."""


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums the functions' rewards, leaving out NaN (None) entries.

    Args:
        rewards: float32 [..., F].
        weights: float32 [F].

    Returns:
        float32 [...]; NaN where all F entries are NaN.
    """
    total = (rewards * weights).nansum(-1)
    return torch.where(rewards.isnan().all(-1), torch.nan, total)


def _nan_mean(values: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
    return values.nanmean(-1, keepdim=keepdim)


def _nan_std(values: torch.Tensor) -> torch.Tensor:
    """Unbiased (n - 1) standard deviation over the last dimension without NaN; 0 for fewer than two values."""
    count = (~values.isnan()).sum(-1)
    squares = (values - _nan_mean(values, keepdim=True)).square().nansum(-1)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), 0.0)


def group_advantages(rewards: torch.Tensor, scale_rewards: str) -> ScoredGroups:
    """Centres rewards by group and scales them (Shao et al. 2024, GRPO, equation for outcome supervision).

    A = (r - mean_group(r)) / (std + 1e-4), the standard deviation (unbiased) taken over the group ("group") or over the
    whole generation batch ("batch"), or no division at all ("none", Dr. GRPO).

    Args:
        rewards: float32 [P, G], NaN where there is no reward: such completions neither count in the mean nor learn.
        scale_rewards: "group", "batch" or "none".
    """
    rewards = rewards.double()  # equal rewards must give exactly nothing to learn
    centred = rewards - _nan_mean(rewards, keepdim=True)
    group_std = _nan_std(rewards)
    if scale_rewards == "group":
        centred = centred / (group_std[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (_nan_std(rewards.reshape(-1)) + STD_EPSILON)
    return ScoredGroups(rewards.float(), centred.nan_to_num(nan=0.0).float(), group_std.float())
