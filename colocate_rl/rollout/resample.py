"""Dynamic sampling: groups that teach nothing make room for other prompts (DAPO, arXiv:2503.14476, section 3.2).

A group whose completions all earn the same has no advantage to learn from. Its places in the generation batch, on
whichever ranks they are, are given to the next spare prompt, until every group has a spread or the tries run out. All
ranks see all rewards, so all of them replace the same groups by the same prompts.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.advantages import NO_SPREAD, group_advantages, weighted_sum
from colocate_rl.rollout.collect import Answered, Rated, Row
from colocate_rl.rollout.figures import group_positions
from colocate_rl.rollout.sampler import PROMPT_INDEX

Ask = Callable[[Sequence[Row]], Rated]
"""Completions with their rewards for this rank's rows; every rank calls it alike, also without rows."""


class Resampler:
    """Replaces groups without a spread of rewards.

    Args:
        collectives: of the training ranks.
        weights: of the reward functions, float32 [F].
        max_tries: most times that groups of one generation batch are replaced; the last ones are kept as they are.
    """

    def __init__(self, collectives: Collectives, weights: torch.Tensor, max_tries: int) -> None:
        self._collectives = collectives
        self._weights = weights
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
        indices, totals = self._gather(rated)
        flat = flat_groups(indices, totals)
        metrics.mean("dynamic_sampling/frac_reward_zero_std", len(flat) / len(set(indices)))
        metrics.mean("dynamic_sampling/reward", totals.nanmean())
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
            flat = flat_groups(*self._gather(rated))
        metrics.mean("dynamic_sampling/tries", len(dropped))
        metrics.mean("dynamic_sampling/prompts", num_prompts)
        return rated, dropped

    def _gather(self, rated: Rated) -> tuple[list[int], torch.Tensor]:
        """Prompt index and weighted reward of every rank's rows, rank by rank."""
        indices = torch.tensor([row[PROMPT_INDEX] for row in rated.answered.rows], dtype=torch.float64)
        totals = weighted_sum(rated.rewards, self._weights).double()
        table = torch.cat(self._collectives.gather_ragged(torch.stack([indices, totals], dim=1)))
        return table[:, 0].long().tolist(), table[:, 1]


def flat_groups(indices: Sequence[int], totals: torch.Tensor) -> list[int]:
    """Prompt indices of the groups whose rewards are all equal, or missing, in order of appearance.

    Args:
        indices: prompt index of each row.
        totals: [n] weighted rewards, NaN for none.
    """
    positions = group_positions(indices)
    spread = group_advantages(totals[positions], "none").group_std
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
    new = iter(range(len(rows), len(rows) + len(asked.answered.rows)))
    both = _joined(rated, asked)
    places = [next(new) if row[PROMPT_INDEX] in swap else place for place, row in enumerate(rows)]
    gone = [place for place, row in enumerate(rows) if row[PROMPT_INDEX] in swap]
    return _chosen(both, places), _chosen(both, gone)


def _joined(first: Rated, second: Rated) -> Rated:
    """The rows of both; None where one of them lacks an extra column."""
    one, two = first.answered, second.answered
    names = dict.fromkeys([*first.extras, *second.extras])
    return Rated(
        Answered(
            [*one.rows, *two.rows],
            [*one.prompt_ids, *two.prompt_ids],
            [*one.completions, *two.completions],
            [*one.stats, *two.stats],
        ),
        [*first.texts, *second.texts],
        torch.cat([first.rewards, second.rewards]),
        {
            name: [v for part in (first, second) for v in part.extras.get(name, [None] * len(part.texts))]
            for name in names
        },
    )


def _chosen(rated: Rated, places: Sequence[int]) -> Rated:
    answered = rated.answered
    return Rated(
        Answered(
            [answered.rows[place] for place in places],
            [answered.prompt_ids[place] for place in places],
            [answered.completions[place] for place in places],
            answered.stats,
        ),
        [rated.texts[place] for place in places],
        rated.rewards[list(places)],
        {name: [values[place] for place in places] for name, values in rated.extras.items()},
    )
