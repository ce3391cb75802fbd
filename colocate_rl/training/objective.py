"""From a micro-batch to its loss, and the figures that say how the update went."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import TokenStatistics, completion_statistics
from colocate_rl.training.losses import LossInputs, LossOutput, LossSettings, grpo_loss


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes log-probabilities and losses with one set of settings."""

    settings: LossSettings
    temperature: float
    chunk: int
    autocast: Callable[[], Any]
    """Makes the mixed-precision context of a forward pass."""

    def statistics(self, wrapper: nn.Module, policy: nn.Module, batch: RolloutBatch) -> TokenStatistics:
        """Log-probabilities (with gradient) and entropies; see :func:`completion_statistics`."""
        return completion_statistics(
            wrapper,
            policy,
            batch,
            temperature=self.temperature,
            chunk=self.chunk,
            autocast=self.autocast,
        )

    def logprobs(self, model: nn.Module, batch: RolloutBatch, rows_at_once: int) -> torch.Tensor:
        """Log-probabilities float32 [B, T] without gradient, ``rows_at_once`` rows at a time, on the model's device."""
        device = next(model.parameters()).device
        out = torch.zeros(batch.input_ids.shape, device=device)
        with torch.no_grad():
            for start in range(0, batch.num_rows, rows_at_once):
                chosen = range(start, min(start + rows_at_once, batch.num_rows))
                part = batch.rows(chosen).to(device)
                logprobs = self.statistics(model, model, part).logprobs
                out[start : start + len(chosen), : logprobs.shape[1]] = logprobs
        return out

    def loss(
        self,
        wrapper: nn.Module,
        policy: nn.Module,
        batch: RolloutBatch,
        tokens_per_micro_batch: float,
        metrics: MetricBuffer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch, and its log-probabilities (detached, float32 [B, T]).

        Where the batch has no old log-probabilities the live ones stand for them: the ratio is then exactly 1.
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
        output = grpo_loss(inputs, self.settings, tokens_per_micro_batch)
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
