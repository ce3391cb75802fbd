"""From the configuration to the settings of each room, so that no room reads the whole configuration."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from colocate_rl import backend, engines
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.protocol import SamplingSpec
from colocate_rl.placement import Placement
from colocate_rl.rollout.collect import RolloutSettings
from colocate_rl.training.aggregation import DENOMINATORS
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.memory import estimate_step
from colocate_rl.training.moving import EntropyBonus, MovingParts, MovingReference
from colocate_rl.training.objective import Objective
from colocate_rl.training.routers import router_loss
from colocate_rl.training.selection import EntropySelection
from colocate_rl.training.surrogates import Gamma

logger = logging.getLogger(__name__)

EXACT_GAP_LIMIT = 0.01
"""Accepted mean log-probability gap on the probe, in nats, when policy and engine both compute in float32."""
ROUNDED_GAP_LIMIT = 0.2
"""The same where either computes in 16 bits (about 0.02 is usual)."""


def loss_settings(args: GRPOConfig) -> LossSettings:
    """What the losses read."""
    assert args.epsilon_high is not None
    source = args.old_logprobs_source
    return LossSettings(
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        use_bias_correction_kl=args.use_bias_correction_kl,
        max_completion_length=args.max_completion_length,
        old_logprobs=source,
        correction=bool(args.use_vllm) and args.vllm_importance_sampling_correction and source == "policy",
        correction_mode=args.vllm_importance_sampling_mode,
        correction_clip_max=args.vllm_importance_sampling_clip_max,
        correction_clip_min=args.vllm_importance_sampling_clip_min,
        off_policy_threshold=args.off_policy_mask_threshold,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        vespo_positive=Gamma(args.vespo_k_pos, args.vespo_lambda_pos),
        vespo_negative=Gamma(args.vespo_k_neg, args.vespo_lambda_neg),
    )


def objective(
    args: GRPOConfig, config: PretrainedConfig, autocast: Callable[[], Any], collectives: Collectives
) -> Objective:
    """The objective of a run, for padded rows of a policy with this configuration."""
    selection = EntropySelection(args.top_entropy_quantile, collectives) if args.top_entropy_quantile < 1 else None
    return Objective(
        settings=loss_settings(args),
        temperature=args.temperature,
        chunk=args.logprob_chunk_size,
        autocast=autocast,
        max_tokens=args.max_tokens_per_micro_batch,
        selection=selection,
        bonus=entropy_bonus(args),
        fp32_head=args.cast_lm_head_to_fp32,
        router=router_loss(config, args.router_aux_loss_coef, args.gradient_checkpointing_kwargs),
    )


def entropy_bonus(args: GRPOConfig) -> EntropyBonus | None:
    """What weighs the entropy bonus; None: there is none."""
    if not args.use_adaptive_entropy:
        return EntropyBonus(args.entropy_coef) if args.entropy_coef != 0.0 else None
    return EntropyBonus(
        args.entropy_coef,
        target=args.entropy_target,
        delta=args.entropy_coef_delta,
        bounds=(args.entropy_coef_min, args.entropy_coef_max),
    )


def moving_parts(
    args: GRPOConfig, collectives: Collectives, objective: Objective, reference: PreTrainedModel | None
) -> MovingParts:
    """What of the objective moves while the run trains."""
    moving = None
    if args.sync_ref_model:
        assert reference is not None, "an adapter with sync_ref_model is refused before anything is loaded"
        moving = MovingReference(reference, args.ref_model_mixup_alpha, args.ref_model_sync_steps)
    return MovingParts(collectives, moving, objective.bonus)


def rollout_settings(args: GRPOConfig, pad_token_id: int, end_token_ids: tuple[int, ...]) -> RolloutSettings:
    """What rollouts read."""
    sampling = SamplingSpec(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=end_token_ids,
        extra=backend.sampling_extra(args),
    )
    return RolloutSettings(
        sampling=sampling,
        pad_token_id=pad_token_id,
        scale_rewards=str(args.scale_rewards),
        multi_objective_aggregation=args.multi_objective_aggregation,
        mask_truncated_completions=args.mask_truncated_completions,
        pass_columns=not args.remove_unused_columns,
        deal_rows=DENOMINATORS[args.loss_type] != "slice tokens",
    )


def logprob_gap_limit(args: GRPOConfig, policy_dtype: torch.dtype) -> float:
    """The accepted gap on the probe after the first weight sync, in nats."""
    if args.vllm_logprob_gap_limit is not None:
        return args.vllm_logprob_gap_limit
    exact = engines.engine_dtype(args, policy_dtype) == "float32" and not (args.bf16 or args.fp16)
    return EXACT_GAP_LIMIT if exact else ROUNDED_GAP_LIMIT


def decide_checkpointing(args: GRPOConfig, model: torch.nn.Module, placement: Placement, longest_prompt: int) -> None:
    """Switches gradient checkpointing on where the user left it open and one micro-batch would fill the GPU without it.

    Args:
        args: the run's configuration; ``gradient_checkpointing`` is set.
        model: the policy.
        placement: tells whether the GPU is shared with an engine.
        longest_prompt: of the training set, in tokens.
    """
    if not args.checkpointing_is_open or args.device.type != "cuda":
        return
    config: Any = model.config
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    longest = longest_prompt + args.max_completion_length
    tokens = args.per_device_train_batch_size * longest
    if args.max_tokens_per_micro_batch is not None:
        tokens = min(tokens, max(args.max_tokens_per_micro_batch, longest))
    step = estimate_step(
        config,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=max(parameter.element_size() for parameter in parameters),
        num_tokens=tokens,
    )
    memory = float(torch.cuda.get_device_properties(args.device).total_memory)
    memory -= sum(weight.numel() * weight.element_size() for weight in model.parameters() if not weight.requires_grad)
    if args.device.index in placement.shared_devices:
        memory *= 1 - (args.vllm_gpu_memory_utilization or 0.0)
    args.gradient_checkpointing = not step.fits(memory)
    logger.info(
        "gradient checkpointing %s: state %.1f + activations %.1f of %.1f GiB for micro-batches of up to %d tokens",
        "on" if args.gradient_checkpointing else "off",
        step.state / 2**30,
        step.activations / 2**30,
        memory / 2**30,
        tokens,
    )
