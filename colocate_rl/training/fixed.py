"""Log-probabilities that stay as they are while a generation batch is used: the old ones, and the reference's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import adapters
from colocate_rl.training.objective import Objective


@dataclass(frozen=True, slots=True)
class FixedLogprobs:
    """Adds them to a batch."""

    objective: Objective
    policy: Any
    """The unwrapped policy, a ``PeftModel`` where it is its own reference."""
    reference: nn.Module | None
    """A model of its own; None: the policy by :func:`colocate_rl.training.adapters.reference_weights`."""
    needs_reference: bool
    old_logprobs: str
    """See :attr:`colocate_rl.options.GRPOOptions.old_logprobs_source`."""

    def add(self, batch: RolloutBatch, *, policy_moves: bool = False) -> RolloutBatch:
        """Old log-probabilities and, where it is needed, the reference's.

        Args:
            batch: on the CPU.
            policy_moves: the policy moves before the batch has its turn. As long as it has not, the live ones are the
                same numbers as the policy's old ones, which are therefore not computed.
        """
        old = None
        if self.old_logprobs == "sampling":
            old = batch.sampling_logprobs
        elif policy_moves:
            old = self.objective.logprobs(self.policy, batch).cpu()
        return self.add_reference(batch.with_logprobs(old_logprobs=old))

    def add_reference(self, batch: RolloutBatch) -> RolloutBatch:
        """The reference's log-probabilities, where it is needed."""
        if not self.needs_reference:
            return batch
        return batch.with_logprobs(ref_logprobs=self._of_reference(batch).cpu())

    def _of_reference(self, batch: RolloutBatch) -> torch.Tensor:
        if self.reference is not None:
            return self.objective.logprobs(self.reference, batch)
        with adapters.reference_weights(self.policy):
            return self.objective.logprobs(self.policy, batch)
