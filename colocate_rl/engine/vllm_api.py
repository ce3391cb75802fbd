"""The only importer of vLLM: its objects, made from ours and read back into ours.

vLLM is imported on first use, inside the engine's view of the process (:mod:`colocate_rl.isolation`).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colocate_rl.engine.protocol import AdapterLayer, Completion
from colocate_rl.errors import ConfigError, EngineError

ADAPTER_ID = 1
"""vLLM's number of the one adapter an engine holds."""
UNFUSED = ("get_rename_mapper", "get_unstacked_mapper")
"""How versions call a mapper without its part that fuses layers; 0.24 has no such part."""


def build_llm(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """An ``LLM``; the user's ``extra`` arguments win.

    Raises:
        ConfigError: when vLLM knows one of the extra arguments not.
    """
    from vllm import LLM

    try:
        llm = LLM(**{**arguments, **extra})
    except TypeError as error:
        if not extra:
            raise
        raise ConfigError(f"vllm_engine_kwargs={dict(extra)}: vLLM takes no such argument ({error}).") from error
    _compile_grammars_at_once(llm)
    return llm


def wraps_transformers(architectures: Sequence[str]) -> bool:
    """Whether vLLM runs these models by its wrapper around transformers' own classes, having no code of its own."""
    from vllm import ModelRegistry

    known = [ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models]
    wrapper = "vllm.model_executor.models.transformers"
    return not known or any(getattr(model, "module_name", "").startswith(wrapper) for model in known)


def _compile_grammars_at_once(llm: Any) -> None:
    """Has a request with structured outputs ready to run when it is added, whatever threads are busy with.

    vLLM compiles grammars in threads, and requests run in the order in which these finish. Those without a seed sample
    from one stream, so the same seed would give other completions each time. Shards of one engine, which must agree
    anyway, compile at once by vLLM's own choice; every compiled grammar is kept, so it is done once per engine.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:  # else it runs elsewhere, which is refused later
        core.structured_output_manager._use_async_grammar_compilation = False


def leave_groups() -> None:
    """Ends vLLM's process groups and frees its memory, where vLLM has been imported at all."""
    if "vllm" in sys.modules:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.platforms import interface

        cleanup_dist_env_and_memory()
        interface._assigned_physical_gpu_ids = None  # else it refuses the next engine any other GPU


def sampling_parameters(**values: Any) -> Any:
    """vLLM's sampling parameters of one prompt; ids in, ids and log-probabilities out."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    try:
        if isinstance(values.get("structured_outputs"), dict):
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        return SamplingParams(**{"logprobs": 0, "detokenize": False, "flat_logprobs": True, **values})
    except TypeError as error:
        raise ConfigError(f"generation_kwargs: vLLM's SamplingParams takes no such key ({error}).") from error


def completion_of(output: Any) -> Completion:
    """What ``LLM.generate`` answered for one completion.

    Raises:
        EngineError: when it did not end, or its log-probabilities belong to other tokens.
    """
    token_ids = list(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"a completion ended with {output.finish_reason!r} after {len(token_ids)} tokens.")
    return Completion(token_ids, _sampled_logprobs(token_ids, output.logprobs), output.finish_reason)


def _sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The log-probability of each sampled token; the engine lists the sampled token first, then any other."""
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        found = [logprobs.token_ids[start] for start in starts]
        if found != list(token_ids):
            raise EngineError("the engine's log-probabilities belong to other tokens than it sampled.")
        return [float(logprobs.logprobs[start]) for start in starts]
    return [float(entry[token].logprob) for token, entry in zip(token_ids, logprobs, strict=True)]


def adapter_request() -> Any:
    """What a request carries so that the adapter takes part in its answer; nothing is read from the path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="held-in-memory")


def adapter_model(
    layers: Sequence[AdapterLayer], factors: Sequence[tuple[torch.Tensor, torch.Tensor]], names: Any
) -> Any:
    """An adapter as vLLM's LoRA manager takes it, made of tensors in memory.

    Args:
        layers: see :class:`AdapterLayer`.
        factors: A [rank, inputs] and B [outputs, rank] of each layer, the scaling already in B.
        names: the engine model's mapper from checkpoint names to its own, or None.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.utils import parse_fine_tuned_lora_name

    names = next((getattr(names, way)() for way in UNFUSED if hasattr(names, way)), names)
    loras = {}
    for layer, (a, b) in zip(layers, factors, strict=True):
        module, _ = parse_fine_tuned_lora_name(f"base_model.model.{layer.name}.lora_A.weight", names)
        loras[module] = LoRALayerWeights(module, layer.rank, layer.rank, a, b, scaling=1)
    return LoRAModel(ADAPTER_ID, max(layer.rank for layer in layers), loras)
