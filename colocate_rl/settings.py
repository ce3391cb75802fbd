"""From the configuration to the settings of each room, so that no room reads the whole configuration."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from colocate_rl import engines
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.protocol import SamplingSpec
from colocate_rl.placement import Placement
from colocate_rl.rollout.collect import RolloutSettings
from colocate_rl.training import attention, packing, selfcheck
from colocate_rl.training import policy as policies
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.memory import estimate_step
from colocate_rl.training.objective import Objective

logger = logging.getLogger(__name__)

EXACT_GAP_LIMIT = 0.01
"""Accepted mean log-probability gap on the probe, in nats, when policy and engine both compute in float32."""
ROUNDED_GAP_LIMIT = 0.2
"""The same where either computes in 16 bits (about 0.02 is usual)."""


def loss_settings(args: GRPOConfig) -> LossSettings:
    """What the losses read."""
    assert args.epsilon_high is not None
    return LossSettings(
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        use_bias_correction_kl=args.use_bias_correction_kl,
        max_completion_length=args.max_completion_length,
        correction=args.vllm_importance_sampling_correction and args.old_logprobs == "policy",
        correction_mode=args.vllm_importance_sampling_mode,
        correction_clip_max=args.vllm_importance_sampling_clip_max,
        correction_clip_min=args.vllm_importance_sampling_clip_min,
    )


def rollout_settings(args: GRPOConfig, pad_token_id: int, end_token_ids: tuple[int, ...]) -> RolloutSettings:
    """What rollouts read."""
    assert not isinstance(args.generation_kwargs, str)
    sampling = SamplingSpec(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=end_token_ids,
        extra=args.generation_kwargs or {},
    )
    return RolloutSettings(
        sampling=sampling,
        pad_token_id=pad_token_id,
        scale_rewards=str(args.scale_rewards),
        mask_truncated_completions=args.mask_truncated_completions,
        pass_columns=not args.remove_unused_columns,
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


def decide_packing(
    args: GRPOConfig, models: Sequence[PreTrainedModel], objective: Objective, collectives: Collectives
) -> Objective:
    """Lets rows pass through the models without padding where that is wanted, possible and proven to be the same.

    Args:
        args: the run's configuration.
        models: policy and, where there is one, reference, on their device.
        objective: computes with padding.
        collectives: every rank must call this; all of them decide alike.

    Returns:
        The objective to use.
    """
    wanted = args.padding_free if args.padding_free is not None else args.device.type == "cuda"
    if not wanted:
        return objective
    reasons = [reason for reason in collectives.gather_objects(_try_packing(args, models, objective)) if reason]
    if not reasons:
        return replace(objective, packed=True)
    for model in models:
        if model.config._attn_implementation == attention.NAME:
            attention.uninstall(model)
    logger.log(
        logging.WARNING if args.padding_free else logging.INFO,
        "rows keep their padding: %s %s. padding_free=False says so without asking.",
        type(models[0]).__name__,
        reasons[0],
    )
    return objective


def _try_packing(args: GRPOConfig, models: Sequence[PreTrainedModel], objective: Objective) -> str | None:
    """Prepares the models; why they must keep their padding, or None."""
    known = next(filter(None, map(packing.obstacle, models)), None)
    if known is not None:
        return f"is not made for packed rows: {known}"
    exact = policies.model_dtype(models[0]) == torch.float32 and not (args.bf16 or args.fp16)
    for model in models:
        attention.install(model)
        try:
            found = selfcheck.compare(model, objective)
        except Exception as error:  # whatever a model of another kind stumbles over: it keeps its padding
            return f"fails on packed rows ({type(error).__name__}: {error})"
        shortfall = found.shortfall(exact=exact)
        if shortfall is not None:
            return f"computes something else on packed rows: {shortfall}"
        logger.info(
            "%s without padding: mean log-probability gap %.1e to padded rows, cosine of gradients %.6f",
            type(model).__name__,
            found.logprob_gap,
            found.gradient_cosine,
        )
    return None
