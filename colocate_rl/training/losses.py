"""The loss of a micro-batch out of its parts. Shape letters: B rows, T tokens.

Per-token tensors follow :mod:`colocate_rl.rollout.records`: column t is about token t. Where the formulas come from
stands in :mod:`.ratios`, :mod:`.surrogates` and :mod:`.aggregation`; ``docs/objective.md`` has them side by side.
"""

from dataclasses import dataclass

import torch

from colocate_rl.training.aggregation import AGGREGATIONS, Denominators, SliceSize
from colocate_rl.training.ratios import kl_k3, log_ratio, off_policy_mask, sampling_correction
from colocate_rl.training.surrogates import (
    GAMMA_NEGATIVE,
    GAMMA_POSITIVE,
    Gamma,
    cispo_surrogate,
    clipped_surrogate,
    gamma_weights,
    sapo_surrogate,
    vespo_surrogate,
)


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The part of the configuration that losses read; see :class:`colocate_rl.options.GRPOOptions`."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    max_completion_length: int = 512
    old_logprobs: str = "policy"
    correction: bool = True
    correction_mode: str = "sequence_mask"
    correction_clip_max: float | None = 3.0
    correction_clip_min: float | None = None
    off_policy_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_positive: Gamma = GAMMA_POSITIVE
    vespo_negative: Gamma = GAMMA_NEGATIVE


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss is computed from."""

    policy_logprobs: torch.Tensor
    """float32 [B, T], with gradient."""
    old_logprobs: torch.Tensor
    """float32 [B, T], detached."""
    sampling_logprobs: torch.Tensor
    """float32 [B, T]."""
    ref_logprobs: torch.Tensor | None
    """float32 [B, T]; needed when beta is not 0."""
    mask: torch.Tensor
    """bool [B, T]: tokens in the loss."""
    advantages: torch.Tensor
    """float32 [B]."""
    selected: torch.Tensor | None = None
    """bool [B, T]: tokens of ``mask`` whose entropy is high enough for the policy loss; None: all of them."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and the tensors that metrics are made of (all detached but the loss)."""

    loss: torch.Tensor
    """Scalar, before the division by accumulation steps: this micro-batch's part of its slice's loss."""
    ratio: torch.Tensor
    """float32 [B, T] or [B, 1]: policy over old."""
    kl: torch.Tensor | None
    """float32 [B, T]: k3 estimate against the reference, as it stands in the loss."""
    correction: torch.Tensor | None
    """float32 [B, T] or [B, 1]: weight applied for the engine's other numerics."""
    phi: torch.Tensor | None = None
    """float32 [B, 1]: VESPO's weight of each sequence."""


def grpo_loss(
    inputs: LossInputs, settings: LossSettings, tokens_per_slice: float, whole: SliceSize | None = None
) -> LossOutput:
    """The loss of one micro-batch, as its part of the loss of the slice that it belongs to.

    Per token: surrogate x off-policy mask x entropy selection x sampling correction (which VESPO has in its own
    weight instead) + beta x KL [x ratio], then averaged by ``loss_type``.

    Args:
        inputs: log-probabilities, advantages and mask of the micro-batch.
        settings: see :class:`LossSettings`.
        tokens_per_slice: loss tokens of the generation batch over all ranks / ranks / slices.
        whole: size of the slice; None: the micro-batch is all of it.
    """
    mask = inputs.mask
    level = settings.importance_sampling_level
    ratio = log_ratio(inputs.policy_logprobs, inputs.old_logprobs, mask, level).exp()
    weights = _correction(inputs, settings) if settings.correction else None
    phi = _vespo_weights(inputs, settings, weights) if settings.loss_type == "vespo" else None
    losses = _surrogate(inputs, settings, ratio, phi)
    if settings.off_policy_threshold is not None:
        losses = losses * off_policy_mask(
            inputs.policy_logprobs,
            inputs.sampling_logprobs,
            mask,
            inputs.advantages,
            settings.off_policy_threshold,
        )
    if inputs.selected is not None:
        losses = losses * inputs.selected
    if weights is not None and phi is None:
        losses = losses * weights
    kl = None
    if settings.beta != 0.0:
        assert inputs.ref_logprobs is not None
        kl = kl_k3(inputs.policy_logprobs, inputs.ref_logprobs, mask)
        if settings.use_bias_correction_kl:
            kl = kl * ratio
        losses = losses + settings.beta * kl
        kl = kl.detach()
    if whole is None:
        whole = SliceSize(mask.shape[0], mask.sum())
    denominators = Denominators(settings.max_completion_length, tokens_per_slice, whole)
    loss = AGGREGATIONS[settings.loss_type](losses, mask, denominators)
    return LossOutput(loss, ratio.detach(), kl, weights, phi)


def mean_entropy(entropy: torch.Tensor, chosen: torch.Tensor, num_chosen: torch.Tensor) -> torch.Tensor:
    """This micro-batch's part of the mean entropy (nats) of its slice's chosen tokens; a scalar.

    Args:
        entropy: float32 [B, T].
        chosen: bool [B, T].
        num_chosen: scalar, of the whole slice.
    """
    return (entropy * chosen).sum() / num_chosen.clamp(min=1)


def _surrogate(
    inputs: LossInputs, settings: LossSettings, ratio: torch.Tensor, phi: torch.Tensor | None
) -> torch.Tensor:
    """Token losses [B, T]."""
    logprobs, advantages = inputs.policy_logprobs, inputs.advantages
    if phi is not None:
        return vespo_surrogate(phi, logprobs, advantages)
    if settings.loss_type == "cispo":
        return cispo_surrogate(ratio, logprobs, advantages, epsilon_high=settings.epsilon_high)
    if settings.loss_type == "sapo":
        losses = sapo_surrogate(
            ratio,
            advantages,
            temperature_pos=settings.sapo_temperature_pos,
            temperature_neg=settings.sapo_temperature_neg,
        )
    else:
        losses = clipped_surrogate(
            ratio,
            advantages,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high,
            delta=settings.delta,
        )
    return losses.expand_as(logprobs)


def _correction(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    return sampling_correction(
        inputs.old_logprobs,
        inputs.sampling_logprobs,
        inputs.mask,
        mode=settings.correction_mode,
        clip_max=settings.correction_clip_max,
        clip_min=settings.correction_clip_min,
    )


def _vespo_weights(inputs: LossInputs, settings: LossSettings, correction: torch.Tensor | None) -> torch.Tensor:
    return gamma_weights(
        inputs.policy_logprobs - inputs.old_logprobs,
        correction,
        inputs.advantages,
        inputs.mask,
        positive=settings.vespo_positive,
        negative=settings.vespo_negative,
    )
