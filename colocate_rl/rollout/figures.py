"""What is logged of a generation batch, from a table of all ranks' rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from colocate_rl.balance import deal, imbalance
from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.advantages import NO_SPREAD, ScoredGroups


@dataclass(frozen=True, slots=True)
class Compared:
    """All ranks' rows of whole groups, rank by rank."""

    facts: torch.Tensor
    """float64 [n, 4]: prompt index, prompt tokens, completion tokens, whether it ended by itself."""
    rewards: torch.Tensor
    """float32 [n, F], NaN for None."""
    advantages: torch.Tensor
    """float32 [n]."""
    num_rows: list[int]
    """Of each rank."""

    @classmethod
    def joined(cls, parts: Sequence["Compared"]) -> "Compared":
        """The rows of all parts."""
        spans = [(part, part.rows_of(rank)) for rank in range(len(parts[0].num_rows)) for part in parts]
        return cls(
            torch.cat([part.facts[rows.start : rows.stop] for part, rows in spans]),
            torch.cat([part.rewards[rows.start : rows.stop] for part, rows in spans]),
            torch.cat([part.advantages[rows.start : rows.stop] for part, rows in spans]),
            [sum(counts) for counts in zip(*(part.num_rows for part in parts), strict=True)],
        )

    def rows_of(self, rank: int) -> range:
        """Where a rank's rows stand."""
        start = sum(self.num_rows[:rank])
        return range(start, start + self.num_rows[rank])

    def indices(self) -> list[int]:
        """Prompt index of each row."""
        indices: list[int] = self.facts[:, 0].long().tolist()
        return indices

    def tokens(self) -> list[float]:
        """Tokens of each row, prompt and completion."""
        tokens: list[float] = self.facts[:, 1:3].sum(1).tolist()
        return tokens


def gather_rewards(
    collectives: Collectives, indices: Sequence[int], rewards: torch.Tensor
) -> tuple[list[int], torch.Tensor]:
    """All ranks' rewards, rank by rank; every rank must call it.

    Args:
        collectives: of the training ranks.
        indices: prompt index of each row of this rank.
        rewards: float32 [n, F] of this rank, NaN for None.

    Returns:
        Prompt index of each row, and the rewards of all rows.
    """
    column = torch.tensor(indices, dtype=torch.float64)[:, None]
    table = torch.cat(collectives.gather_ragged(torch.cat([column, rewards.double()], dim=1)))
    return table[:, 0].long().tolist(), table[:, 1:].float()


def group_positions(indices: Sequence[int]) -> torch.Tensor:
    """Where the members of each group stand: int64 [P, G] positions in ``indices``, groups in order of appearance."""
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        positions.setdefault(index, []).append(position)
    sizes = {len(members) for members in positions.values()}
    assert len(sizes) == 1, f"groups of different sizes {sizes} in one generation batch"
    return torch.tensor(list(positions.values()), dtype=torch.int64)


def log_lengths(metrics: MetricBuffer, compared: Compared) -> None:
    """Lengths of prompts and completions of a whole generation batch."""
    _, prompt_lengths, lengths, ended_itself = compared.facts.unbind(1)
    terminated = ended_itself.bool()
    weight = len(lengths)
    ended = lengths[terminated] if bool(terminated.any()) else torch.zeros(1, dtype=torch.float64)
    for name, values in (("length", lengths), ("terminated_length", ended)):
        metrics.mean(f"completions/mean_{name}", values.mean(), weight)
        metrics.mean(f"completions/min_{name}", values.min(), weight)
        metrics.mean(f"completions/max_{name}", values.max(), weight)
    metrics.mean("completions/clipped_ratio", (~terminated).double().mean(), weight)
    metrics.mean("prompts/mean_length", prompt_lengths.mean(), weight)


def log_rewards(metrics: MetricBuffer, names: Sequence[str], rewards: torch.Tensor, groups: ScoredGroups) -> None:
    """Rewards of a whole generation batch, function by function (float32 [n, F]) and summed by group."""
    weight = len(rewards)
    for name, column in zip(names, rewards.unbind(-1), strict=True):
        known = column[~column.isnan()]
        metrics.mean(f"rewards/{name}/mean", known.mean() if len(known) else torch.tensor(torch.nan), weight)
        metrics.mean(f"rewards/{name}/std", known.std() if len(known) > 1 else torch.tensor(0.0), weight)
    totals = groups.rewards[~groups.rewards.isnan()]
    metrics.mean("reward", totals.mean() if len(totals) else torch.tensor(torch.nan), weight)
    metrics.mean("reward_std", totals.std() if len(totals) > 1 else torch.tensor(0.0), weight)
    metrics.mean("frac_reward_zero_std", (groups.group_std < NO_SPREAD).double().mean(), weight)


def deal_rows(compared: Compared, room: Sequence[int], loads: Sequence[float] | None = None) -> list[list[int]]:
    """Deals rows to ranks by their tokens.

    Whole groups are kept together (a packed pass computes their prompt once) where every rank has room for whole ones.

    Args:
        compared: all ranks' rows.
        room: rows that each rank takes.
        loads: tokens that each rank has already.

    Returns:
        Of each rank, where its rows stand in ``compared``, in order.
    """
    tokens = compared.tokens()
    units: list[list[int]] = group_positions(compared.indices()).tolist()
    size = len(units[0])
    if any(rows % size for rows in room):
        units, size = [[row] for row in range(len(tokens))], 1
    costs = [sum(tokens[row] for row in unit) for unit in units]
    parts = deal(costs, [rows // size for rows in room], loads)
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def log_deal(metrics: MetricBuffer, compared: Compared, dealt: Sequence[float]) -> None:
    """How uneven the ranks' tokens would have been on the ranks that asked for them, and are as they were dealt."""
    tokens = compared.tokens()
    asked = [sum(tokens[row] for row in compared.rows_of(rank)) for rank in range(len(dealt))]
    metrics.mean("balance/rank_tokens_before", imbalance(asked))
    metrics.mean("balance/rank_tokens", imbalance(dealt))
