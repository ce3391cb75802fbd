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


def decoupled_advantages(
    rewards: Sequence[Sequence[float | None]], weights: Sequence[float], group_size: int
) -> list[float]:
    """GDPO: each function scaled within each group, summed, and the sums scaled over all rows; 0 without any reward."""
    scaled: list[list[float]] = [[] for _ in rewards]
    for start in range(0, len(rewards), group_size):
        group = range(start, min(start + group_size, len(rewards)))
        for function in range(len(weights)):
            column = [rewards[row][function] for row in group]
            known = [value for value in column if value is not None and not math.isnan(value)]
            for row, value in zip(group, column, strict=True):
                if value is None or math.isnan(value):
                    scaled[row].append(math.nan)
                else:
                    scaled[row].append((value - _mean(known)) / (unbiased_std(known) + STD_EPSILON))
    totals = weighted_rewards(scaled, weights)
    known = [value for value in totals if not math.isnan(value)]
    if not known:
        return [0.0] * len(totals)
    scale = unbiased_std(known) + STD_EPSILON
    return [0.0 if math.isnan(value) else (value - _mean(known)) / scale for value in totals]


@dataclass(frozen=True)
class Problem:
    """A micro-batch in float64. All [B, T] but the advantages, [B]; 0 or 1 in ``mask``."""

    policy: Array
    old: Array
    sampling: Array
    ref: Array
    mask: Array
    advantages: Array
    entropy: Array


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
    off_policy_threshold: float | None = None
    top_share: float = 1.0
    """Of tokens by entropy."""
    entropy_coef: float = 0.0
    sapo: tuple[float, float] = (1.0, 1.05)
    """Temperature for advantages above 0, and for the others."""
    vespo_k: tuple[float, float] = (2.0, 3.0)
    """For advantages of at least 0, and for the others."""
    vespo_lambda: tuple[float, float] = (3.0, 2.0)


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


def stays(problem: Problem, row: int, threshold: float | None) -> bool:
    """Whether a row is near enough to the policy, or good enough, to be learned from (DeepSeek-V3.2)."""
    if threshold is None or problem.advantages[row] >= 0:
        return True
    gaps = []
    for token in _counted(problem.mask, row):
        gap = float(problem.sampling[row, token] - problem.policy[row, token])
        gaps.append(0.0 if math.isnan(gap) else gap)
    return not gaps or _mean(gaps) <= threshold


def selected(problem: Problem, share: float) -> set[tuple[int, int]]:
    """Tokens of the mask whose entropy is at least the (1 - share) quantile, interpolated between ranks."""
    places = [(row, token) for row in range(problem.mask.shape[0]) for token in _counted(problem.mask, row)]
    if not places:
        return set()
    ordered = sorted(float(problem.entropy[place]) for place in places)
    position = (len(ordered) - 1) * (1 - share)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    bound = ordered[below] + (ordered[above] - ordered[below]) * (position - below)
    return {place for place in places if problem.entropy[place] >= bound - 1e-12}


def vespo_weight(problem: Problem, row: int, rules: Rules) -> float:
    """w^k exp(lambda (1 - w)) with w the product of policy / old x (bounded) old / engine over the row's tokens."""
    log_w = 0.0
    for token in _counted(problem.mask, row):
        step = float(problem.policy[row, token] - problem.old[row, token])
        log_w += min(max(step, -20.0), 20.0)
        weight = correction(problem, row, token, rules)
        log_w += min(max(math.log(weight), math.log(1e-8)), 20.0) if weight > 0 else math.log(1e-8)
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    side = 0 if problem.advantages[row] >= 0 else 1
    k, rate = rules.vespo_k[side], rules.vespo_lambda[side]
    return math.exp(k * log_w + rate * (1 - math.exp(log_w)))


def policy_objective(problem: Problem, row: int, token: int, rules: Rules, fixed: Problem) -> float:
    """What is to be made large of one token, before corrections; ``fixed`` stands where gradients stop."""
    advantage = float(problem.advantages[row])
    if rules.loss_type == "vespo":
        return vespo_weight(fixed, row, rules) * advantage * float(problem.policy[row, token])
    if rules.loss_type == "cispo":
        held = min(ratio(fixed, row, token, rules.level), rules.epsilon_high)
        return held * advantage * float(problem.policy[row, token])
    c = ratio(problem, row, token, rules.level)
    if rules.loss_type == "sapo":
        tau = rules.sapo[0] if advantage > 0 else rules.sapo[1]
        return advantage * 4 / tau / (1 + math.exp(-tau * (c - 1)))
    return surrogate(c, advantage, rules.epsilon, rules.epsilon_high, rules.delta)


def token_loss(problem: Problem, row: int, token: int, rules: Rules, fixed: Problem | None = None) -> float:
    """The loss of one token, before any averaging."""
    c = ratio(problem, row, token, rules.level)
    fixed = problem if fixed is None else fixed
    loss = -policy_objective(problem, row, token, rules, fixed)
    if rules.loss_type != "vespo":
        loss *= correction(problem, row, token, rules)
    if not stays(fixed, row, rules.off_policy_threshold) or (row, token) not in selected(problem, rules.top_share):
        loss = 0.0
    if rules.beta:
        penalty = k3(float(problem.policy[row, token]), float(problem.ref[row, token]))
        if rules.bias_correction:
            penalty *= c
        loss += rules.beta * penalty
    return loss


def loss(problem: Problem, rules: Rules, fixed: Problem | None = None) -> float:
    """The loss of a micro-batch, before the division by accumulation steps.

    Args:
        problem: where the loss is computed.
        rules: what it is.
        fixed: what stands where gradients stop, for differences; None: the problem itself.
    """
    chosen = selected(problem, rules.top_share)
    bonus = sum(float(problem.entropy[place]) for place in chosen) / max(len(chosen), 1)
    return policy_loss(problem, rules, fixed) - rules.entropy_coef * bonus


def policy_loss(problem: Problem, rules: Rules, fixed: Problem | None = None) -> float:
    """The same without the entropy bonus."""
    rows = problem.mask.shape[0]
    by_row = [
        [token_loss(problem, row, token, rules, fixed) for token in _counted(problem.mask, row)] for row in range(rows)
    ]
    if rules.loss_type in ("grpo", "sapo"):
        return _mean([_mean(losses) if losses else 0.0 for losses in by_row])
    if rules.loss_type == "luspo":
        return _mean([sum(losses) for losses in by_row])
    total, count = 0.0, 0
    for losses in by_row:
        for value in losses:
            total += value
            count += 1
    if rules.loss_type == "bnpo":
        return total / max(count, 1)
    if rules.loss_type == "dr_grpo":
        return total / (rows * rules.max_completion_length)
    assert rules.loss_type in ("dapo", "cispo", "vespo")
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
