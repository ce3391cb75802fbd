"""An evaluation: completions of held-out prompts by the engines, their rewards, and the loss they would have."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.collect import Rollout
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.stages import Row
from colocate_rl.training.fixed import FixedLogprobs
from colocate_rl.training.objective import Objective


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What every evaluation of a run needs."""

    args: GRPOConfig
    rollout: Rollout
    objective: Objective
    fixed: FixedLogprobs
    collectives: Collectives
    seed: Callable[[int], int | None]
    """Of a generation batch of the evaluation, by its number; None: the engines' own streams."""
    apart: Callable[[], AbstractContextManager[None]]
    """Within it the engines are asked for other prompts than those of training."""

    def run(
        self, policy: nn.Module, batches: Iterable[Sequence[Row]], trainer_state: Any, after: Callable[[], None]
    ) -> tuple[dict[str, float | None], int]:
        """Generates for every row, a generation batch at a time; every rank must call it.

        Args:
            policy: unwrapped, in evaluation mode; the engines have its weights.
            batches: this rank's rows.
            trainer_state: handed to the reward functions.
            after: called after each generation batch.

        Returns:
            All ranks' figures, and the number of their rows.
        """
        metrics, num_rows = MetricBuffer(), 0
        for number, rows in enumerate(batches):
            with self.apart():
                _, batch, _ = self.rollout.collect(rows, metrics, trainer_state=trainer_state, seed=self.seed(number))
            self._note_loss(policy, batch, metrics)
            num_rows += len(rows)
            after()
        return metrics.flush(self.collectives), int(self.collectives.sum(torch.tensor([num_rows])).item())

    def _note_loss(self, policy: nn.Module, batch: RolloutBatch, metrics: MetricBuffer) -> None:
        size = self.args.per_device_eval_batch_size
        most = int(self.collectives.max(torch.tensor([batch.num_rows])))
        for start in range(0, most, size):  # as often on every rank: an objective may compare them
            part = batch.rows(range(min(start, batch.num_rows), min(start + size, batch.num_rows)))
            part = self.fixed.add_reference(part).to(self.args.device)
            with torch.no_grad():
                loss, _ = self.objective.loss(policy, policy, part, float(part.loss_mask.sum()), metrics)
            rows = torch.tensor(float(part.num_rows))
            metrics.share("loss", loss.detach().cpu() * rows, rows)
