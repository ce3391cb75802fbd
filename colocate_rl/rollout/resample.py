"""Dynamic sampling: groups that teach nothing make room for other prompts (DAPO, arXiv:2503.14476, section 3.2).

A group whose completions all earn the same has no advantage to learn from. Its places in the generation batch, on
whichever ranks they are, are given to the next spare prompt, until every group has a spread or the tries run out. All
ranks see all rewards, so all of them replace the same groups by the same prompts.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.advantages import NO_SPREAD, score_groups, weighted_sum
from colocate_rl.rollout.figures import gather_rewards, group_positions
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Rated, Row, joined_columns

T = TypeVar("T")
Ask = Callable[[Sequence[Row]], Rated]
"""Completions with their rewards for this rank's rows; every rank calls it alike, also without rows."""


class Resampler:
    """Replaces groups without a spread of rewards.

    Args:
        collectives: of the training ranks.
        weights: of the reward functions, float32 [F].
        max_tries: most times that groups of one generation batch are replaced; the last ones are kept as they are.
        aggregation: see :func:`colocate_rl.rollout.advantages.score_groups`; it says what a spread is.
    """

    def __init__(
        self,
        collectives: Collectives,
        weights: torch.Tensor,
        max_tries: int,
        *,
        aggregation: str = "sum_then_normalize",
    ) -> None:
        self._collectives = collectives
        self._weights = weights
        self._aggregation = aggregation
        self._max_tries = max_tries

    def refill(self, rated: Rated, spares: Iterable[Row], ask: Ask, metrics: MetricBuffer) -> tuple[Rated, list[Rated]]:
        """Replaces what has no spread; every rank must call it.

        Args:
            rated: this rank's rows of a generation batch.
            spares: prompts to use instead, the same ones in the same order on all ranks, none of them in the batch.
            ask: see :data:`Ask`.
            metrics: receives the number of tries, and the figures of the batch as it was first sampled.

        Returns:
            The batch (its figures of engines hold all tries), and this rank's rows that were replaced, try by try.
        """
        spares = iter(spares)
        indices, rewards = self._gather(rated)
        flat = flat_groups(indices, rewards, self._weights, self._aggregation)
        metrics.mean("dynamic_sampling/frac_reward_zero_std", len(flat) / len(set(indices)))
        metrics.mean("dynamic_sampling/reward", weighted_sum(rewards, self._weights).nanmean())
        dropped: list[Rated] = []
        num_prompts = 0
        while flat and len(dropped) < self._max_tries:
            swap = dict(zip(flat, itertools.islice(spares, len(flat)), strict=False))  # spares may run out
            if not swap:
                break
            rows = rated.answered.rows
            asked = ask([swap[row[PROMPT_INDEX]] for row in rows if row[PROMPT_INDEX] in swap])
            rated, gone = replaced(rated, swap, asked)
            dropped.append(gone)
            num_prompts += len(swap)
            flat = flat_groups(*self._gather(rated), self._weights, self._aggregation)
        metrics.mean("dynamic_sampling/tries", len(dropped))
        metrics.mean("dynamic_sampling/prompts", num_prompts)
        return rated, dropped

    def _gather(self, rated: Rated) -> tuple[list[int], torch.Tensor]:
        """Prompt index and rewards, float32 [n, F], of every rank's rows, rank by rank."""
        indices = [row[PROMPT_INDEX] for row in rated.answered.rows]
        return gather_rewards(self._collectives, indices, rated.rewards)


def flat_groups(indices: Sequence[int], rewards: torch.Tensor, weights: torch.Tensor, aggregation: str) -> list[int]:
    """Prompt indices of the groups that teach nothing, in order of appearance.

    Args:
        indices: prompt index of each row.
        rewards: float32 [n, F], NaN for none.
        weights: float32 [F].
        aggregation: "sum_then_normalize": a group is flat when its weighted sums are all equal or missing;
            "normalize_then_sum": when the sums of what each function says after scaling are.
    """
    positions = group_positions(indices)
    spread = score_groups(rewards[positions], weights, aggregation=aggregation, scale_rewards="none").group_std
    firsts = positions[spread < NO_SPREAD, 0].tolist()
    return [indices[position] for position in firsts]


def replaced(rated: Rated, swap: Mapping[int, Row], asked: Rated) -> tuple[Rated, Rated]:
    """Puts new rows where those of replaced groups stood.

    Args:
        rated: this rank's rows.
        swap: prompt index of a group to the row that replaces it.
        asked: the new rows, in the order of those that they replace.

    Returns:
        The rows as they are now, and those that were replaced.
    """
    rows = rated.answered.rows
    gone = [place for place, row in enumerate(rows) if row[PROMPT_INDEX] in swap]
    both = _joined(rated, asked, [*range(len(rows)), *gone])
    new = iter(range(len(rows), len(rows) + len(gone)))
    now = [next(new) if row[PROMPT_INDEX] in swap else place for place, row in enumerate(rows)]
    return _chosen(both, now), _chosen(both, gone)


def _joined(first: Rated, second: Rated, places: list[int]) -> Rated:
    """The rows of both; None where one of them lacks a column."""
    one, two = first.answered, second.answered
    sizes = (len(one.rows), len(two.rows))
    deals = bool(one.everyone and two.everyone)
    return Rated(
        Answered(
            rows=[*one.rows, *two.rows],
            prompt_ids=[*one.prompt_ids, *two.prompt_ids],
            completions=[*one.completions, *two.completions],
            stats=[*one.stats, *two.stats],
            texts=None if one.texts is None and two.texts is None else [*first.texts, *second.texts],
            columns=joined_columns((one.columns, two.columns), sizes),
            figures=_summed(one.figures, two.figures),
            places=places,
            prompts={**one.prompts, **two.prompts} if deals else {},
            everyone={**one.everyone, **two.everyone} if deals else {},
        ),
        [*first.texts, *second.texts],
        torch.cat([first.rewards, second.rewards]),
        joined_columns((first.extras, second.extras), sizes),
    )


def _summed(
    one: Mapping[str, tuple[float, float]], two: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    pairs = {name: (one.get(name, (0.0, 0.0)), two.get(name, (0.0, 0.0))) for name in [*one, *two]}
    return {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()}


def _chosen(rated: Rated, chosen: Sequence[int]) -> Rated:
    """Some rows; what is not about rows stays as it is."""

    def of(values: Sequence[T]) -> list[T]:
        return [values[number] for number in chosen]

    answered = rated.answered
    return Rated(
        replace(
            answered,
            rows=of(answered.rows),
            prompt_ids=of(answered.prompt_ids),
            completions=of(answered.completions),
            texts=None if answered.texts is None else of(answered.texts),
            columns={name: of(values) for name, values in answered.columns.items()},
            places=of(answered.places),
        ),
        of(rated.texts),
        rated.rewards[list(chosen)],
        {name: of(values) for name, values in rated.extras.items()},
    )
