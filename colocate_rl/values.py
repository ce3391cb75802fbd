"""What each setting may be by itself; what several may be together is checked where they meet."""

import math
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from colocate_rl import options
from colocate_rl.errors import ConfigError
from colocate_rl.options import GRPOOptions

CHOICES: dict[str, Any] = {
    "loss_type": options.LossType,
    "importance_sampling_level": options.ImportanceSamplingLevel,
    "scale_rewards": options.ScaleRewards,
    "multi_objective_aggregation": options.MultiObjectiveAggregation,
    "vllm_importance_sampling_mode": options.SamplingCorrectionMode,
    "old_logprobs": options.OldLogprobs,
    "overlap": options.Overlap,
    "lora_sync": options.LoraSync,
    "on_reward_error": options.OnRewardError,
    "vllm_model_impl": options.ModelImplementation,
}
"""Settings that take one of a few words."""

Rule = tuple[str, bool, str]
"""Name of a setting, whether its value fits, and what fits."""


def check_types(args: GRPOOptions) -> None:
    """Refuses a text where a number is meant: what compares or computes with it would only say that it cannot.

    Raises:
        ConfigError: for the first one.
    """
    for name, kind in get_type_hints(GRPOOptions).items():
        value = getattr(args, name)
        if isinstance(value, str) and str not in (kind, *get_args(kind)) and name not in options.JSON_OPTIONS:
            raise ConfigError(
                f"{name}={value!r} is a text. Give it without quotes (1e-5 is a text in YAML too: write 1.0e-5)."
            )


def check_choices(args: GRPOOptions) -> None:
    """Refuses words that are none of :data:`CHOICES`.

    Raises:
        ConfigError: for the first one.
    """
    for name, literal in CHOICES.items():
        value = getattr(args, name)
        if value not in options.choices(literal):
            raise ConfigError(f"{name}={value!r} is unknown. Use one of: {', '.join(options.choices(literal))}.")


def check_rules(args: object, rules: Iterable[Rule]) -> None:
    """Refuses settings that break a rule.

    Raises:
        ConfigError: for the first one.
    """
    for name, fits, rule in rules:
        if not fits:
            raise ConfigError(f"{name} is {getattr(args, name)}; it must be {rule}.")


def check_ranges(args: GRPOOptions) -> None:
    """Refuses numbers that cannot work.

    Raises:
        ConfigError: for the first one.
    """
    if args.num_generations < 2:
        raise ConfigError(
            f"num_generations is {args.num_generations}: an advantage compares the completions of one prompt, so at "
            "least 2 are needed."
        )
    if args.temperature <= 0:
        raise ConfigError(
            f"temperature={args.temperature}: greedy completions of one prompt are all the same, which leaves no "
            "advantage to learn from. Use a value above 0."
        )
    check_rules(args, [*_of_generation(args), *_of_training(args), *_of_loss_types(args)])
    weights = [*(args.reward_weights or []), args.beta, args.entropy_coef]
    if not all(map(math.isfinite, weights)):
        raise ConfigError(
            f"reward_weights={args.reward_weights}, beta={args.beta}, entropy_coef={args.entropy_coef}: every weight "
            "must be a finite number."
        )


def _of_generation(args: GRPOOptions) -> list[Rule]:
    copies, share, min_p = args.num_generations_eval, args.vllm_gpu_memory_utilization, args.min_p
    gap, seqs, shown = args.vllm_logprob_gap_limit, args.vllm_max_num_seqs, args.num_completions_to_print
    turns, timeout_s = args.max_tool_calling_iterations, args.reward_timeout_s
    return [
        ("num_generations_eval", copies is None or copies >= 1, "at least 1"),
        ("max_completion_length", args.max_completion_length >= 1, "at least 1 token"),
        ("vllm_gpu_memory_utilization", share is None or 0 < share <= 1, "above 0, up to 1: a share of the memory"),
        ("vllm_max_num_seqs", seqs is None or seqs > 0, "at least 1"),
        ("vllm_logprob_gap_limit", gap is None or gap >= 0, "at least 0 nats (0: no check)"),
        ("temperature", math.isfinite(args.temperature), "a finite number"),
        ("top_p", 0 < args.top_p <= 1, "above 0, up to 1"),
        ("top_k", args.top_k >= 0, "at least 0 (0 is off)"),
        ("min_p", min_p is None or 0 <= min_p <= 1, "0 to 1 (0 is off)"),
        ("repetition_penalty", 0 < args.repetition_penalty < math.inf, "above 0 (1.0 is off)"),
        ("max_tool_calling_iterations", turns is None or turns > 0, "at least 1"),
        ("max_resample_tries", args.max_resample_tries >= 1, "at least 1"),
        ("reward_num_workers", args.reward_num_workers >= 0, "at least 0 (0: in the training process)"),
        ("reward_timeout_s", timeout_s is None or timeout_s > 0, "above 0 seconds"),
        ("num_completions_to_print", shown is None or shown >= 0, "at least 0"),
    ]


def _of_training(args: GRPOOptions) -> list[Rule]:
    most, threshold = args.max_tokens_per_micro_batch, args.off_policy_mask_threshold
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    router = args.router_aux_loss_coef
    return [
        ("num_iterations", args.num_iterations >= 1, "at least 1: each generation batch is used at least once"),
        ("logprob_chunk_size", args.logprob_chunk_size >= 1, "at least 1 token"),
        ("max_tokens_per_micro_batch", most is None or most > 0, "at least 1 token"),
        ("ref_model_mixup_alpha", 0 < args.ref_model_mixup_alpha <= 1, "above 0, up to 1: it is the policy's share"),
        ("ref_model_sync_steps", args.ref_model_sync_steps >= 1, "at least 1 optimizer step"),
        ("top_entropy_quantile", 0 <= args.top_entropy_quantile <= 1, "a share of tokens, 0 to 1"),
        ("entropy_coef_delta", args.entropy_coef_delta >= 0, "at least 0"),
        ("router_aux_loss_coef", router is None or router >= 0, "at least 0"),
        ("off_policy_mask_threshold", threshold is None or threshold > 0, "above 0, in nats per token"),
        (
            "vllm_importance_sampling_clip_min",
            low is None or low >= 0,
            "at least 0: it bounds a probability ratio from below",
        ),
        (
            "vllm_importance_sampling_clip_max",
            high is None or high > 0,
            "above 0: it bounds a probability ratio from above",
        ),
    ]


def _of_loss_types(args: GRPOOptions) -> list[Rule]:
    return [
        ("epsilon", args.epsilon >= 0, "at least 0"),
        ("epsilon_high", args.epsilon_high is None or args.epsilon_high >= 0, "at least 0"),
        ("delta", args.delta is None or args.delta > 1, "above 1: it bounds a probability ratio from above"),
        ("sapo_temperature_pos", args.sapo_temperature_pos > 0, "above 0"),
        ("sapo_temperature_neg", args.sapo_temperature_neg > 0, "above 0"),
        ("vespo_k_pos", args.vespo_k_pos >= 0, "at least 0"),
        ("vespo_k_neg", args.vespo_k_neg >= 0, "at least 0"),
        ("vespo_lambda_pos", args.vespo_lambda_pos > 0, "above 0"),
        ("vespo_lambda_neg", args.vespo_lambda_neg > 0, "above 0"),
    ]
