"""Everything that decides how an engine is built, and what vLLM reads of it from environment and model folder."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from colocate_rl.errors import EngineError


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
    lora: LoraSpec | None = None
    """Room for an adapter; None: adapters arrive merged, if at all."""
    lean: bool = True
    """Generate with :mod:`colocate_rl.engine.lean`; False: with ``LLM.generate``."""


def first_group(spec: EngineSpec) -> int | None:
    """The shards of an engine name their process groups alike: by the port on which they meet."""
    return None if spec.port is None or spec.tensor_parallel_size == 1 else spec.port << 20


def process_environment(spec: EngineSpec) -> dict[str, str]:
    """Variables that vLLM sees inside the engine's view of the process."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in this process
        "VLLM_HOST_IP": "127.0.0.1",  # saves a slow look-up of the host's name
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets apply_model pass a function; nothing leaves this process
        "HF_HUB_OFFLINE": "1",  # the engine reads a local folder only
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if spec.device is None:
        environment["TORCHDYNAMO_DISABLE"] = (
            "1"  # eager on CPU: a few compiled helpers would only ask for a C++ compiler
        )
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        if spec.cpu_cores is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = spec.cpu_cores
    if spec.tensor_parallel_size > 1:
        if spec.port is None:
            raise EngineError("an engine of several shards needs a port on which they meet.")
        environment |= {
            "RANK": str(spec.shard),
            "LOCAL_RANK": str(spec.shard),
            "WORLD_SIZE": str(spec.tensor_parallel_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(spec.port),
        }
    return environment


def write_model_folder(folder: Path, config: Any, dtype: str) -> None:
    """Writes the policy's live configuration (an embedding may have been resized) where vLLM reads it."""
    values = config.to_dict()
    values["dtype"] = dtype
    values.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values, default=str))
