"""Settings and methods that TRL has and this library does not, and what to do instead; see ``docs/from_trl.md``."""

from collections.abc import Iterable

from colocate_rl.errors import ConfigError

_NO_SERVER = "there is no server, engines live in the training processes. Set num_vllm_gpus"

TRL_ONLY = {
    "ds3_gather_for_generation": "there is no ZeRO-3. Leave it out",
    "pad_to_multiple_of": "rows are packed without padding on a GPU. Leave it out, or see padding_free",
    "transformers_continuous_batching_config": "vLLM engines generate. Leave it out",
    "vllm_enable_sleep_mode": "an engine has its own GPU, where weights and cache stay. Leave it out",
    "vllm_server_base_url": _NO_SERVER,
    "vllm_server_host": _NO_SERVER,
    "vllm_server_port": _NO_SERVER,
    "vllm_server_timeout": _NO_SERVER,
    "vllm_group_port": "weights are copied inside the process. Leave it out",
    "log_multimodal": "there are no images. Leave it out",
    "log_completions_hub_repo": "upload the parquet files in completions/ of the output folder instead",
    "max_prompt_length": "prompts are never cut. Shorten them in the data set, or set vllm_max_model_length",
    "model_revision": "set model_init_kwargs={'revision': ...}",
    "torch_dtype": "set model_init_kwargs={'dtype': ...}",
    "lora_target_parameters": "adapters of expert tensors have no way into the engines. Use lora_target_modules",
}
"""What to do instead of each."""

_ROLLOUT = "pass rollout_func, or tools"
_LOSS = "choose loss_type and its settings, or override compute_loss"
_ROWS = "change the data set, or override get_train_dataloader or get_eval_dataloader"

TRL_METHODS = {
    "_generate": _ROLLOUT,
    "_generate_single_turn": _ROLLOUT,
    "_generate_and_score_completions": _ROLLOUT,
    "_tokenize_prompts": "set chat_template_kwargs or tokenizer.chat_template, or pass rollout_func",
    "_tool_call_loop": _ROLLOUT,
    "_calculate_rewards": "pass reward_funcs",
    "_compute_loss": _LOSS,
    "_get_per_token_logps_and_entropies": _LOSS,
    "get_high_entropy_mask": "set top_entropy_quantile",
    "get_off_policy_mask": "set off_policy_mask_threshold",
    "get_gamma_weights": "set loss_type='vespo' and its settings",
    "_get_train_sampler": _ROWS,
    "_get_eval_sampler": _ROWS,
    "prediction_step": "override evaluation_loop",
}
"""Methods that users of TRL override and that nothing here calls: what to do instead of each."""


def check_names(names: Iterable[str]) -> None:
    """Refuses the first of these names that only TRL knows.

    Raises:
        ConfigError: with what to do instead.
    """
    for name in names:
        if name in TRL_ONLY:
            raise ConfigError(f"{name} is TRL's, and has no meaning here: {TRL_ONLY[name]}.")


def check_overrides(trainer: type, base: type) -> None:
    """Refuses a subclass that overrides a method of TRL's trainer which would never be called.

    Args:
        trainer: the subclass.
        base: what it is a subclass of; ``transformers.Trainer`` gives it some of the names.

    Raises:
        ConfigError: with what to do instead.
    """
    for name, instead in TRL_METHODS.items():
        if getattr(trainer, name, None) is not getattr(base, name, None):
            raise ConfigError(
                f"{trainer.__name__} overrides {name}, which TRL's trainer calls and this one does not, so it would "
                f"have no effect. Instead, {instead}; a method of your own needs another name."
            )
