"""From a slice of a rollout to its loss, and the figures that say how the update went."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import TokenStatistics, completion_statistics
from colocate_rl.training.losses import LossInputs, LossOutput, LossSettings, SliceSize, grpo_loss
from colocate_rl.training.packing import fill

EarlyBackward = Callable[[], AbstractContextManager[Callable[[torch.Tensor], None]]]
"""Makes the context of a micro-batch that is not the last of its slice; inside, the function runs a backward pass."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes log-probabilities and losses with one set of settings."""

    settings: LossSettings
    temperature: float
    chunk: int
    autocast: Callable[[], Any]
    """Makes the mixed-precision context of a forward pass."""
    packed: bool = False
    """Whether rows pass through the models without padding."""
    max_tokens: int | None = None
    """Most tokens of a micro-batch (with their padding, where there is any); None: no limit."""

    def statistics(self, wrapper: nn.Module, policy: nn.Module, batch: RolloutBatch) -> TokenStatistics:
        """Log-probabilities (with gradient) and entropies; see :func:`completion_statistics`."""
        return completion_statistics(
            wrapper,
            policy,
            batch,
            temperature=self.temperature,
            chunk=self.chunk,
            autocast=self.autocast,
            packed=self.packed,
        )

    def micro_batches(self, batch: RolloutBatch) -> list[list[int]]:
        """Cuts a slice into row numbers of micro-batches of at most ``max_tokens`` tokens."""
        if self.max_tokens is None:
            return [list(range(batch.num_rows))] if batch.num_rows else []
        return fill(batch.attention_mask.sum(1).tolist(), self.max_tokens, padded=not self.packed)

    def logprobs(self, model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
        """Log-probabilities float32 [B, T] without gradient or dropout, a micro-batch at a time."""
        device = next(model.parameters()).device
        out = torch.zeros(batch.input_ids.shape, device=device)
        was_training = model.training
        model.eval()  # the engine, which these are compared with, knows no dropout
        try:
            with torch.no_grad():
                for rows in self.micro_batches(batch):
                    found = self.statistics(model, model, batch.rows(rows).to(device)).logprobs
                    out[rows, : found.shape[1]] = found
        finally:
            model.train(was_training)
        return out

    def loss(
        self,
        wrapper: nn.Module,
        policy: nn.Module,
        batch: RolloutBatch,
        tokens_per_slice: float,
        metrics: MetricBuffer,
        early: EarlyBackward | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a slice, and its log-probabilities (detached, float32 [B, T]).

        Where the batch has no old log-probabilities the live ones stand for them: the ratio is then exactly 1.

        Args:
            wrapper: the policy as the trainer wrapped it, or the policy itself.
            policy: the causal language model inside.
            batch: the slice, on the policy's device.
            tokens_per_slice: see :func:`grpo_loss`.
            metrics: takes the figures of the update.
            early: runs the backward passes of all micro-batches but the last, whose activations then never exist side
                by side. The loss has the value of the whole slice and the gradient of the last micro-batch. None:
                nothing is run, as in evaluation.
        """
        whole = SliceSize(batch.num_rows, batch.loss_mask.sum())
        logprobs = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
        total = torch.zeros((), device=batch.input_ids.device)
        groups = self.micro_batches(batch)
        for number, rows in enumerate(groups):
            part = batch.rows(rows) if len(groups) > 1 else batch
            if early is None or number == len(groups) - 1:
                loss, found = self.part_loss(wrapper, policy, part, tokens_per_slice, whole, metrics)
            else:
                with early() as backward:
                    loss, found = self.part_loss(wrapper, policy, part, tokens_per_slice, whole, metrics)
                    backward(loss)
                loss = loss.detach()
            total = total + loss
            logprobs[rows, : found.shape[1]] = found
        return total, logprobs

    def part_loss(
        self,
        wrapper: nn.Module,
        policy: nn.Module,
        batch: RolloutBatch,
        tokens_per_slice: float,
        whole: SliceSize,
        metrics: MetricBuffer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What one forward pass over some rows adds to the loss of their slice, and their log-probabilities.

        Args:
            wrapper: the policy as the trainer wrapped it, or the policy itself.
            policy: the causal language model inside.
            batch: the rows, on the policy's device.
            tokens_per_slice: see :func:`grpo_loss`.
            whole: size of the slice that the rows belong to.
            metrics: takes the figures of the update.
        """
        live = self.statistics(wrapper, policy, batch)
        detached = live.logprobs.detach()
        old = batch.old_logprobs if batch.old_logprobs is not None else detached
        inputs = LossInputs(
            policy_logprobs=live.logprobs,
            old_logprobs=old,
            sampling_logprobs=batch.sampling_logprobs,
            ref_logprobs=batch.ref_logprobs,
            mask=batch.loss_mask,
            advantages=batch.advantages,
        )
        output = grpo_loss(inputs, self.settings, tokens_per_slice, whole)
        self._log(metrics, inputs, output, live.entropy)
        return output.loss, detached

    def _log(self, metrics: MetricBuffer, inputs: LossInputs, output: LossOutput, entropy: torch.Tensor) -> None:
        mask = inputs.mask.float()
        tokens = mask.sum()
        metrics.share("entropy", (entropy * mask).sum(), tokens)
        if output.kl is not None:
            metrics.share("kl", (output.kl * mask).sum(), tokens)
        positive = inputs.advantages[:, None] > 0
        negative = inputs.advantages[:, None] < 0
        low = ((output.ratio < 1 - self.settings.epsilon) & negative) * mask
        high = ((output.ratio > 1 + self.settings.epsilon_high) & positive) * mask
        metrics.share("clip_ratio/low_mean", low.sum(), tokens)
        metrics.share("clip_ratio/high_mean", high.sum(), tokens)
        metrics.share("clip_ratio/region_mean", (low + high).sum(), tokens)
        metrics.largest("policy_ratio/max_deviation", ((output.ratio - 1) * mask).abs().max())
        lengths = mask.sum(-1).clamp(min=1)
        metrics.smallest("clip_ratio/low_min", (low.sum(-1) / lengths).min())
        metrics.largest("clip_ratio/high_max", (high.sum(-1) / lengths).max())
        gap = ((inputs.old_logprobs - inputs.sampling_logprobs) * mask).abs()
        metrics.share("sampling/sampling_logp_difference/mean", gap.sum(), tokens)
        metrics.largest("sampling/sampling_logp_difference/max", gap.max())
        if output.correction is not None:
            name = "sampling/importance_sampling_ratio"
            per_token = output.correction.shape[1] > 1
            weight = mask if per_token else torch.ones_like(output.correction)
            metrics.share(f"{name}/mean", (output.correction * weight).sum(), weight.sum())
            metrics.smallest(f"{name}/min", output.correction.masked_fill(weight == 0, torch.inf).min())
            metrics.largest(f"{name}/max", output.correction.masked_fill(weight == 0, -torch.inf).max())
