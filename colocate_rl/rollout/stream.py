"""A generation batch bit by bit: whole groups are scored, and their rows given to ranks, while others are generated.

All ranks go through the same rounds. In a round they exchange what the engines have finished (nothing, often), score
the groups that it made whole, and deal their rows out for training; a rank may get none. What is logged is joined over
the rounds, so figures are those of a batch that came at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout import figures
from colocate_rl.rollout.collect import Begun, Rollout
from colocate_rl.rollout.figures import Compared
from colocate_rl.rollout.pending import Pending
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.stages import Answered, Scored

POLL_S = 0.01
"""Longest wait of an engine's host in a round: the others, whose engines may have more, wait for it."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows that a rank trains on as of one round."""

    batch: RolloutBatch
    """On the CPU; may have no rows."""
    places: list[int]
    """Of these rows among the rank's rows of the generation batch, where they are its own; else empty."""


class Stream:
    """One generation batch under way.

    Args:
        rollout: of this rank.
        begun: what the engines were asked for.
        metrics: receives the figures of the rollout.
        trainer_state: handed to the reward functions.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self, rollout: Rollout, begun: Begun, metrics: MetricBuffer, trainer_state: Any, rank: int, world_size: int
    ) -> None:
        self._rollout = rollout
        self._begun = begun
        self._metrics = metrics
        self._trainer_state = trainer_state
        self._rank = rank
        self._scored: list[Scored] = []
        self._compared: list[Compared] = []
        self._room = [len(begun.rows)] * world_size
        self._loads = [0.0] * world_size

    def rounds(self) -> Iterator[Arrived]:
        """Every round in which rows have arrived anywhere; all ranks must go through all of them together."""
        pending = self._begun.pending
        assert isinstance(pending, Pending)
        while not pending.is_whole:
            answered = self._rollout.poll(self._begun, POLL_S)
            if answered.prompts:
                yield self._take(answered)

    def finish(self) -> tuple[Answered, Scored]:
        """The whole generation batch, once its rounds are over: the engines are free, the figures are logged."""
        answered = self._rollout.wait(self._begun)
        compared = Compared.joined(self._compared)
        self._rollout.log(compared, self._metrics)
        if self._rollout.deals_rows:
            figures.log_deal(self._metrics, compared, self._loads)
        return answered, Scored.joined(self._scored)

    def _take(self, answered: Answered) -> Arrived:
        rated = self._rollout.rate(answered, self._metrics, trainer_state=self._trainer_state)
        scored, compared = self._rollout.compare(rated)
        self._scored.append(scored)
        self._compared.append(compared)
        if not self._rollout.deals_rows:
            return Arrived(self._rollout.own(scored), answered.places)
        tokens = compared.tokens()
        parts = figures.deal_rows(compared, self._room, self._loads)
        for rank, part in enumerate(parts):
            self._room[rank] -= len(part)
            self._loads[rank] += sum(tokens[row] for row in part)
        return Arrived(self._rollout.dealt(answered, compared, parts[self._rank]), [])
