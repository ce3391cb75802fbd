"""Who generates, vLLM engines or the policies themselves, and which settings each of them takes."""

import re
from collections.abc import Mapping
from typing import Any

from colocate_rl.errors import ConfigError
from colocate_rl.options import GRPOOptions, dictionary

OWN_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "seed": "seed with vllm_per_request_seeds",
}
"""Keys of ``generation_kwargs`` that have a setting of their own, which the loss reads too."""
ENGINE_SAMPLING_KEYS = ("logprobs", "prompt_logprobs", "detokenize", "flat_logprobs", "output_kind", "stop")
"""Keys of ``generation_kwargs`` that decide how completions are read back."""
ENGINE_OWNED_ARGUMENTS = (
    "model",
    "load_format",
    "logprobs_mode",
    "skip_tokenizer_init",
    "device_ids",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "lora_target_modules",
)
"""Arguments of ``vllm.LLM`` that the engine's place in the run depends on."""
POLICY_SAMPLING_KEYS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_eos_token_id",
    "ignore_eos",
    "min_new_tokens",
    "remove_invalid_values",
    "sequence_bias",
    "suppress_tokens",
)
"""Keys of ``generation_kwargs`` with ``use_vllm=False``.

They change the next token's distribution, whatever the padding of a row."""

_ONLY_VLLM: Mapping[str, tuple[Any, ...]] = {
    "num_vllm_gpus": (None, 0),
    "vllm_devices": (None,),
    "vllm_tensor_parallel_size": (1,),
    "vllm_gpu_memory_utilization": (None,),
    "vllm_dtype": (None,),
    "vllm_enforce_eager": (None,),
    "vllm_engine_kwargs": (None, {}),
    "vllm_model_impl": ("vllm",),
    "vllm_structured_outputs_regex": (None,),
    "lora_sync": ("auto",),
    "overlap": ("none",),
}
"""Settings that say something about engines, and the values that say nothing."""


def resolve(options: GRPOOptions) -> None:
    """Settles ``use_vllm`` and ``num_vllm_gpus``, and refuses settings of the other way to generate.

    ========  =============  ==========================================================
    use_vllm  num_vllm_gpus  who generates
    ========  =============  ==========================================================
    None      None           one vLLM engine
    None      K              K vLLM engines (0 is refused where ranks are placed)
    True      None or K      the same
    False     None or 0      every rank, with its own policy, through transformers
    False     K > 0          refused
    ========  =============  ==========================================================

    Raises:
        ConfigError: for a setting that would have no effect.
    """
    if options.use_vllm is None:
        options.use_vllm = True
    if options.use_transformers_continuous_batching or options.use_transformers_paged:
        raise ConfigError(
            "Continuous batching of transformers is not supported: vLLM engines do that, faster. Remove "
            "use_transformers_continuous_batching (and use_transformers_paged), and leave use_vllm at True."
        )
    if options.use_vllm:
        if options.num_vllm_gpus is None:
            options.num_vllm_gpus = 1
        if options.cache_implementation is not None:
            raise ConfigError(
                f"cache_implementation={options.cache_implementation!r} belongs to transformers' generate, and vLLM "
                "engines generate. Remove it, or set use_vllm=False."
            )
    else:
        given = {name: getattr(options, name) for name in _ONLY_VLLM}
        wrong = [f"{name}={value!r}" for name, value in given.items() if value not in _ONLY_VLLM[name]]
        if wrong:
            raise ConfigError(
                f"use_vllm=False lets each rank generate with its own policy, so there is no engine for "
                f"{', '.join(wrong)}. Remove {'it' if len(wrong) == 1 else 'them'}, or set use_vllm=True."
            )
        options.num_vllm_gpus = 0
    _check_generation_kwargs(options)
    _check_regex(options.vllm_structured_outputs_regex)


def _check_generation_kwargs(options: GRPOOptions) -> None:
    """Refuses keys that would contradict a setting without anybody noticing, or that have no effect."""
    for key in dictionary(options.generation_kwargs):
        if key in OWN_SAMPLING_KEYS:
            raise ConfigError(
                f"generation_kwargs holds {key!r}, which the loss would not see. Set {OWN_SAMPLING_KEYS[key]} instead."
            )
        if key in ENGINE_SAMPLING_KEYS:
            raise ConfigError(f"generation_kwargs holds {key!r}, on which reading completions depends. Remove it.")
        if not options.use_vllm and key not in POLICY_SAMPLING_KEYS:
            raise ConfigError(
                f"generation_kwargs holds {key!r}, which does nothing with use_vllm=False. Known there: "
                f"{', '.join(POLICY_SAMPLING_KEYS)}."
            )


def _check_regex(regex: str | None) -> None:
    try:
        re.compile(regex or "")
    except re.error as error:
        raise ConfigError(f"vllm_structured_outputs_regex={regex!r} is no regular expression: {error}.") from None


def sampling_extra(options: GRPOOptions) -> dict[str, Any]:
    """Further sampling parameters: ``generation_kwargs``, with the regular expression where there is one."""
    extra = dictionary(options.generation_kwargs)
    if options.vllm_structured_outputs_regex is not None:
        extra["structured_outputs"] = {"regex": options.vllm_structured_outputs_regex}
    return extra


def needs_tokenizer(options: GRPOOptions) -> bool:
    """Whether an engine must know what its tokens say, to sample as asked."""
    return not {"structured_outputs", "bad_words"}.isdisjoint(sampling_extra(options))


def needs_child(options: GRPOOptions) -> bool:
    """Whether an engine cannot live in the training process itself.

    It generates while the rank trains, or vLLM wraps classes of transformers in it, the policy's own among them.
    """
    return options.overlap != "none" or options.vllm_model_impl == "transformers"
