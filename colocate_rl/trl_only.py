"""Settings that TRL has and this library does not, each with what to do instead; see ``docs/from_trl.md``."""

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


def check_names(names: Iterable[str]) -> None:
    """Refuses the first of these names that only TRL knows.

    Raises:
        ConfigError: with what to do instead.
    """
    for name in names:
        if name in TRL_ONLY:
            raise ConfigError(f"{name} is TRL's, and has no meaning here: {TRL_ONLY[name]}.")
