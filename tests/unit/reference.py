"""GRPO arithmetic a second time, in float64 NumPy: one row and one token at a time, from the papers' formulas.

Nothing here is shared with ``colocate_rl``, and nothing is vectorised: the tests compare the package with these loops.
``m`` is the mask of a row (1: the token counts), and every list of rows may be ragged in what its mask leaves over.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
STD_EPSILON = 1e-4


def weighted_rewards(rewards: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """One weighted sum per completion over the functions that scored it; NaN where none did."""
    totals = []
    for row in rewards:
        total, scored = 0.0, False
        for value, weight in zip(row, weights, strict=True):
            if value is not None and not math.isnan(value):
                total += value * weight
                scored = True
        totals.append(total if scored else math.nan)
    return totals


def _mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def unbiased_std(values: Sequence[float]) -> float:
    """Square root of the sum of squared deviations over n - 1; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = _mean(values)
    squares = 0.0
    for value in values:
        squares += (value - centre) ** 2
    return math.sqrt(squares / (len(values) - 1))


def advantages(rewards: Sequence[float], group_size: int, scale: str) -> list[float]:
    """Advantages of consecutive groups of ``group_size`` rewards, NaN for a completion without one."""
    everything = [value for value in rewards if not math.isnan(value)]
    result = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = [value for value in group if not math.isnan(value)]
        for value in group:
            if math.isnan(value):
                result.append(0.0)
                continue
            advantage = value - _mean(known)
            if scale == "group":
                advantage /= unbiased_std(known) + STD_EPSILON
            elif scale == "batch":
                advantage /= unbiased_std(everything) + STD_EPSILON
            result.append(advantage)
    return result


@dataclass(frozen=True)
class Problem:
    """A micro-batch in float64. All [B, T] but the advantages, [B]; 0 or 1 in ``mask``."""

    policy: Array
    old: Array
    sampling: Array
    ref: Array
    mask: Array
    advantages: Array


@dataclass(frozen=True)
class Rules:
    """What the loss is to do; names as in the configuration."""

    loss_type: str
    level: str
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    bias_correction: bool = True
    correction_mode: str | None = None
    """None: no sampling correction."""
    clip_max: float | None = 3.0
    clip_min: float | None = None
    max_completion_length: int = 16
    tokens_per_micro_batch: float = 1.0


def _counted(mask: Array, row: int) -> list[int]:
    """Positions of the tokens of ``row`` that count."""
    return [token for token in range(mask.shape[1]) if mask[row, token]]


def ratio(problem: Problem, row: int, token: int, level: str) -> float:
    """Probability ratio policy / old of one token, or of its sequence (geometric mean over its tokens)."""
    if level == "token":
        return math.exp(problem.policy[row, token] - problem.old[row, token])
    total, count = 0.0, 0
    for other in _counted(problem.mask, row):
        total += problem.policy[row, other] - problem.old[row, other]
        count += 1
    return math.exp(total / count)


def surrogate(c: float, advantage: float, epsilon: float, epsilon_high: float, delta: float | None) -> float:
    """The clipped objective of one token (to be made large)."""
    inside = c
    if inside < 1 - epsilon:
        inside = 1 - epsilon
    if inside > 1 + epsilon_high:
        inside = 1 + epsilon_high
    unclipped = c
    if delta is not None and unclipped > delta:
        unclipped = delta
    first, second = unclipped * advantage, inside * advantage
    return first if first < second else second


def k3(policy: float, ref: float) -> float:
    """Schulman's estimate of KL(policy || ref) from one token drawn from the policy."""
    return math.exp(ref) / math.exp(policy) - (ref - policy) - 1


def correction(problem: Problem, row: int, token: int, rules: Rules) -> float:
    """Weight policy / engine of one token, or of its sequence (product over its tokens), bounded as the mode says."""
    if rules.correction_mode is None:
        return 1.0
    unit, bound = rules.correction_mode.split("_")
    if unit == "token":
        gap = problem.old[row, token] - problem.sampling[row, token]
        weight = 1.0 if math.isnan(gap) else math.exp(gap)
    else:
        weight = 1.0
        for other in _counted(problem.mask, row):
            gap = problem.old[row, other] - problem.sampling[row, other]
            if not math.isnan(gap):
                weight *= math.exp(gap)
    too_small = rules.clip_min is not None and weight < rules.clip_min
    too_large = rules.clip_max is not None and weight > rules.clip_max
    if bound == "mask":
        return 0.0 if too_small or too_large else weight
    if too_small:
        assert rules.clip_min is not None
        return rules.clip_min
    if too_large:
        assert rules.clip_max is not None
        return rules.clip_max
    return weight


def token_loss(problem: Problem, row: int, token: int, rules: Rules) -> float:
    """The loss of one token, before any averaging."""
    c = ratio(problem, row, token, rules.level)
    objective = surrogate(c, float(problem.advantages[row]), rules.epsilon, rules.epsilon_high, rules.delta)
    loss = -objective * correction(problem, row, token, rules)
    if rules.beta:
        penalty = k3(float(problem.policy[row, token]), float(problem.ref[row, token]))
        if rules.bias_correction:
            penalty *= c
        loss += rules.beta * penalty
    return loss


def loss(problem: Problem, rules: Rules) -> float:
    """The loss of a micro-batch, before the division by accumulation steps."""
    rows = problem.mask.shape[0]
    by_row = [[token_loss(problem, row, token, rules) for token in _counted(problem.mask, row)] for row in range(rows)]
    if rules.loss_type == "grpo":
        return _mean([_mean(losses) if losses else 0.0 for losses in by_row])
    total, count = 0.0, 0
    for losses in by_row:
        for value in losses:
            total += value
            count += 1
    if rules.loss_type == "bnpo":
        return total / max(count, 1)
    if rules.loss_type == "dr_grpo":
        return total / (rows * rules.max_completion_length)
    assert rules.loss_type == "dapo"
    return total / max(rules.tokens_per_micro_batch, 1.0)


def gradient(function: Callable[[Array], float], at: Array, step: float = 1e-5) -> Array:
    """Central differences of a function of a matrix."""
    result = np.zeros_like(at)
    for position in np.ndindex(*at.shape):
        above, below = at.copy(), at.copy()
        above[position] += step
        below[position] -= step
        result[position] = (function(above) - function(below)) / (2 * step)
    return result
