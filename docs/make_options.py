"""Prints ``docs/options.md``: every setting of :mod:`colocate_rl.options` by theme, with its own help text.

    python -m docs.make_options > docs/options.md

Which settings TRL has too is read from the tables of ``docs/from_trl.md``.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from colocate_rl.options import option_fields

FROM_TRL = Path(__file__).with_name("from_trl.md")

THEMES: Mapping[str, str] = {
    "Ranks, engines and devices": """
        num_vllm_gpus vllm_devices vllm_tensor_parallel_size use_vllm vllm_mode""",
    "Inside an engine": """
        vllm_gpu_memory_utilization vllm_max_model_length vllm_max_num_seqs vllm_dtype vllm_enforce_eager
        vllm_model_impl vllm_engine_kwargs vllm_logprob_gap_limit lora_sync""",
    "When engines generate": """
        overlap max_staleness""",
    "Batches": """
        num_generations num_generations_eval generation_batch_size steps_per_generation num_iterations shuffle_dataset
        dynamic_sampling max_resample_tries""",
    "Sampling": """
        max_completion_length temperature top_p top_k min_p repetition_penalty generation_kwargs
        vllm_structured_outputs_regex vllm_per_request_seeds chat_template_kwargs max_tool_calling_iterations
        cache_implementation use_transformers_continuous_batching use_transformers_paged""",
    "Rewards and advantages": """
        reward_weights multi_objective_aggregation scale_rewards remove_unused_columns reward_num_workers
        reward_timeout_s on_reward_error""",
    "Loss": """
        loss_type importance_sampling_level epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg mask_truncated_completions
        off_policy_mask_threshold top_entropy_quantile""",
    "Reference model": """
        beta use_bias_correction_kl sync_ref_model ref_model_mixup_alpha ref_model_sync_steps""",
    "Entropy bonus and experts": """
        entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        router_aux_loss_coef""",
    "Old log-probabilities and the engine's numerics": """
        old_logprobs vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap""",
    "Model and optimizer": """
        model_init_kwargs trust_remote_code cast_lm_head_to_fp32 disable_dropout bf16 learning_rate""",
    "Speed and memory of training": """
        padding_free compile_layers max_tokens_per_micro_batch logprob_chunk_size gradient_checkpointing
        use_liger_loss""",
    "Logging": """
        logging_steps log_completions num_completions_to_print log_unique_prompts log_timeline log_reward_trace""",
}

HEAD = """\
# Options

Made by `python -m docs.make_options > docs/options.md`; do not edit. Each is a field of `GRPOConfig` and a flag of
`python -m colocate_rl.grpo` (`--num-vllm-gpus 2`). **Bold**: not in TRL. Every other field of
`transformers.TrainingArguments` works too, except for what [from_trl.md](from_trl.md) says. Formulas:
[objective.md](objective.md).
"""


def main() -> None:
    """Command line."""
    sys.stdout.write(options_page())


def options_page() -> str:
    """The whole page."""
    known_to_trl = set(re.findall(r"`(\w+)`", "\n".join(first_cells(FROM_TRL.read_text("utf-8")))))
    items = {item.name: item for item in option_fields()}
    parts = [HEAD]
    for theme, names in THEMES.items():
        rows = [_row(items[name], own=name not in known_to_trl) for name in names.split()]
        parts.append("\n".join([f"\n## {theme}\n", "| option | default | meaning |", "|---|---|---|", *rows, ""]))
    return "".join(parts)


def first_cells(page: str) -> Iterator[str]:
    """The first cell of every table row of a Markdown page, headings and rules left out."""
    for line in page.splitlines():
        if line.startswith("| `"):
            yield line.split("|")[1].strip()


def _row(item: Field[Any], *, own: bool) -> str:
    name = f"**`{item.name}`**" if own else f"`{item.name}`"
    text = item.metadata["help"].replace("|", "\\|")
    return f"| {name} | `{item.default}` | {text} |"


if __name__ == "__main__":
    main()
