"""Which settings of the objective can work together: pure checks of :mod:`colocate_rl.options`."""

import logging
import warnings

from colocate_rl.errors import ConfigError
from colocate_rl.options import GRPOOptions

logger = logging.getLogger(__name__)


def check_objective(args: GRPOOptions) -> None:
    """Refuses combinations that cannot work and warns of those that hardly do what their user means.

    Raises:
        ConfigError: with the numbers, and the setting to change.
    """
    _check_sampling_correction(args)
    _check_reference(args)
    _check_entropy(args)
    _warn_of_levels(args)


def take_old_names(args: GRPOOptions) -> None:
    """Moves values of TRL's old names to where they are read."""
    if args.vllm_importance_sampling_cap is not None:
        warnings.warn(
            "vllm_importance_sampling_cap is TRL's old name; set vllm_importance_sampling_clip_max.",
            FutureWarning,
            stacklevel=5,
        )
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap
    if args.use_liger_loss is not None:
        logger.info(
            "use_liger_loss=%s changes nothing: log-probabilities are computed logprob_chunk_size=%d tokens at a time "
            "for every loss_type, without full logits.",
            args.use_liger_loss,
            args.logprob_chunk_size,
        )


def _check_sampling_correction(args: GRPOOptions) -> None:
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    mode = args.vllm_importance_sampling_mode
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
        )
    if args.vllm_importance_sampling_correction and mode.endswith("truncate") and low is None and high is None:
        raise ConfigError(
            f"vllm_importance_sampling_mode={mode!r} truncates at vllm_importance_sampling_clip_min and _clip_max, but "
            "both are None. Set at least one."
        )
    corrected = args.use_vllm and args.vllm_importance_sampling_correction and args.old_logprobs_source == "policy"
    if args.loss_type == "vespo" and corrected and mode.startswith("sequence"):
        raise ConfigError(
            f"loss_type='vespo' multiplies the correction weights of a sequence's tokens itself, but "
            f"vllm_importance_sampling_mode={mode!r} has one weight per sequence. Set it to 'token_truncate' or "
            "'token_mask', or vllm_importance_sampling_correction=False."
        )


def _check_reference(args: GRPOOptions) -> None:
    if args.sync_ref_model and args.beta == 0.0:
        raise ConfigError(
            "sync_ref_model=True, but beta=0.0, so there is no KL term and no reference model that could follow the "
            "policy. Set beta to its weight, or remove sync_ref_model."
        )


def _check_entropy(args: GRPOOptions) -> None:
    if not args.use_adaptive_entropy:
        return
    low, high = args.entropy_coef_min, args.entropy_coef_max
    if not low <= args.entropy_coef <= high:
        raise ConfigError(
            f"use_adaptive_entropy starts from entropy_coef={args.entropy_coef} and keeps it between "
            f"entropy_coef_min={low} and entropy_coef_max={high}, which do not hold it. Change one of them."
        )


def _warn_of_levels(args: GRPOOptions) -> None:
    """Warns where loss type and level of the ratio contradict each other."""
    by_sequence = args.importance_sampling_level == "sequence"
    reason = None
    if args.loss_type == "luspo" and not by_sequence:
        reason = "LUSPO is defined with one ratio per sequence; set importance_sampling_level='sequence'"
    elif args.loss_type == "vespo" and by_sequence:
        reason = "VESPO weighs sequences by itself, and the level only changes the KL term; leave it at 'token'"
    elif args.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo") and by_sequence:
        reason = "this averages over tokens, so each sequence's one ratio counts as often as it has tokens; GSPO has "
        reason += "loss_type='grpo'"
    if reason is not None:
        logger.warning(
            "loss_type=%r with importance_sampling_level=%r: %s.",
            args.loss_type,
            args.importance_sampling_level,
            reason,
        )
