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


def score_groups(rewards: torch.Tensor, weights: torch.Tensor, *, aggregation: str, scale_rewards: str) -> ScoredGroups:
    """Advantages of a generation batch.

    Args:
        rewards: float32 [P, G, F], NaN where a function returned None.
        weights: float32 [F].
        aggregation: "sum_then_normalize" (:func:`group_advantages` of the weighted sum) or "normalize_then_sum"
            (:func:`decoupled_advantages`, which does not read ``scale_rewards``).
        scale_rewards: "group", "batch" or "none".
    """
    if aggregation == "normalize_then_sum":
        return decoupled_advantages(rewards, weights)
    return group_advantages(weighted_sum(rewards, weights), scale_rewards)


def _nan_std(values: torch.Tensor) -> torch.Tensor:
    """Unbiased (n - 1) standard deviation over the last dimension without NaN; 0 for fewer than two values."""
    count = (~values.isnan()).sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
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
    centred = rewards - rewards.nanmean(-1, keepdim=True)
    group_std = _nan_std(rewards)
    if scale_rewards == "group":
        centred = centred / (group_std[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        centred = centred / (_nan_std(rewards.reshape(-1)) + STD_EPSILON)
    return ScoredGroups(rewards.float(), centred.nan_to_num(nan=0.0).float(), group_std.float())


def decoupled_advantages(rewards: torch.Tensor, weights: torch.Tensor) -> ScoredGroups:
    """Scales each function's rewards by group before they are summed (GDPO, 2026, arXiv 2601.05242).

    Every function gets z = (r - mean_group(r)) / (std_group(r) + 1e-4); the weighted sums of a completion's z are then
    centred and scaled once more over the whole generation batch. A function whose rewards spread little counts as much
    as one whose rewards spread a lot.

    Args:
        rewards: float32 [P, G, F], NaN where a function returned None.
        weights: float32 [F].

    Returns:
        The scored groups; ``group_std`` is that of the summed z, so 0 where no function tells completions apart.
    """
    by_function = rewards.double().transpose(1, 2)
    centred = by_function - by_function.nanmean(-1, keepdim=True)
    scores = (centred / (_nan_std(by_function)[..., None] + STD_EPSILON)).transpose(1, 2)
    totals = weighted_sum(scores, weights.double())
    everything = totals.reshape(-1)
    advantages = (totals - everything.nanmean()) / (_nan_std(everything) + STD_EPSILON)
    return ScoredGroups(
        weighted_sum(rewards, weights), advantages.nan_to_num(nan=0.0).float(), _nan_std(totals).float()
    )
