"""The figures that say how an update went; ``docs/objective.md`` lists their names."""

import torch

from colocate_rl.metrics import MetricBuffer
from colocate_rl.training.losses import LossInputs, LossOutput, LossSettings

CLIPPED_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types that clip the ratio on both sides."""


def note_update(
    metrics: MetricBuffer, settings: LossSettings, inputs: LossInputs, output: LossOutput, entropy: torch.Tensor
) -> None:
    """Adds the figures of one micro-batch; none of them waits for the device.

    Args:
        metrics: takes them.
        settings: of the loss.
        inputs: of the loss.
        output: of the loss.
        entropy: float32 [B, T], detached.
    """
    mask = inputs.mask.float()
    tokens = mask.sum()
    metrics.share("entropy", (entropy * mask).sum(), tokens)
    if output.kl is not None:
        metrics.share("kl", (output.kl * mask).sum(), tokens)
    metrics.largest("policy_ratio/max_deviation", ((output.ratio - 1) * mask).abs().max())
    weight = _weight(output.ratio, mask)
    if settings.loss_type in CLIPPED_TYPES:
        _note_clipping(metrics, settings, inputs, output.ratio, weight)
    elif settings.loss_type == "cispo":
        capped = (output.ratio > settings.epsilon_high) & (inputs.advantages[:, None] > 0)
        metrics.share("cispo_clip_ratio", (capped * weight).sum(), weight.sum())
    elif output.phi is not None:
        weight = _weight(output.phi, mask)
        metrics.share("vespo/phi_seq_mean", (output.phi * weight).sum(), weight.sum())
    _note_sampling(metrics, settings, inputs, output, mask)


def _weight(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What each entry of ``values`` counts: tokens [B, T] by the mask; rows [B, 1] 1, but 0 without tokens."""
    return mask if values.shape[1] > 1 else (mask.sum(-1, keepdim=True) > 0).float()


def _note_clipping(
    metrics: MetricBuffer, settings: LossSettings, inputs: LossInputs, ratio: torch.Tensor, weight: torch.Tensor
) -> None:
    advantages = inputs.advantages[:, None]
    low = ((ratio < 1 - settings.epsilon) & (advantages < 0)) * weight
    high = ((ratio > 1 + settings.epsilon_high) & (advantages > 0)) * weight
    total = weight.sum()
    metrics.share("clip_ratio/low_mean", low.sum(), total)
    metrics.share("clip_ratio/high_mean", high.sum(), total)
    metrics.share("clip_ratio/region_mean", (low + high).sum(), total)
    counted = weight.sum(-1)
    empty = counted == 0
    metrics.smallest("clip_ratio/low_min", (low.sum(-1) / counted).masked_fill(empty, torch.inf).min())
    metrics.largest("clip_ratio/high_max", (high.sum(-1) / counted).masked_fill(empty, -torch.inf).max())


def _note_sampling(
    metrics: MetricBuffer, settings: LossSettings, inputs: LossInputs, output: LossOutput, mask: torch.Tensor
) -> None:
    own = inputs.policy_logprobs.detach() if settings.old_logprobs == "sampling" else inputs.old_logprobs
    gap = ((own - inputs.sampling_logprobs) * mask).abs()
    metrics.share("sampling/sampling_logp_difference/mean", gap.sum(), mask.sum())
    metrics.largest("sampling/sampling_logp_difference/max", gap.max())
    if output.correction is None:
        return
    name = "sampling/importance_sampling_ratio"
    weight = mask if output.correction.shape[1] > 1 else torch.ones_like(output.correction)
    metrics.share(f"{name}/mean", (output.correction * weight).sum(), weight.sum())
    metrics.smallest(f"{name}/min", output.correction.masked_fill(weight == 0, torch.inf).min())
    metrics.largest(f"{name}/max", output.correction.masked_fill(weight == 0, -torch.inf).max())
