"""From the configuration to the engine of this rank: who hosts what, and how each engine is built."""

import logging
import os
import socket
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from colocate_rl import backend
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import Engine
from colocate_rl.engine.spec import EngineSpec, LoraSpec
from colocate_rl.engine.transformers_engine import TransformersEngine
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import ConfigError, NeedsOwnProcessError, PlacementError
from colocate_rl.options import dictionary
from colocate_rl.placement import Placement, Shard, split_evenly
from colocate_rl.training.layout import checkpoint_parts
from colocate_rl.training.shape import DecoderShape

logger = logging.getLogger(__name__)

DEDICATED_MEMORY_SHARE = 0.9
"""Share of an engine's own device that vLLM may use when the user names none."""


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What an engine must know of the policy and its work."""

    config: PretrainedConfig
    dtype: torch.dtype
    """Of the policy's parameters."""
    window: int | None
    """Context window in tokens, or None for the model's own."""
    longest_prompt: int
    """Of the training set, in tokens."""
    tokenizer: PreTrainedTokenizerBase
    """It goes into the engine only where sampling needs it."""
    lora: LoraSpec | None = None
    """Room for an adapter that arrives apart from the weights."""


def plan_placement(args: GRPOConfig, num_ranks: int, num_nodes: int = 1) -> Placement:
    """The placement of this node.

    Args:
        args: the run's configuration.
        num_ranks: training ranks on this node.
        num_nodes: machines of the launch.

    Raises:
        PlacementError: when ranks, engines and devices do not fit together.
    """
    if num_nodes > 1:
        raise PlacementError(
            f"This launch spans {num_nodes} machines; engines are reached inside one machine only. Launch on one."
        )
    num_gpus = count_gpus(args)
    if not args.use_vllm:
        return Placement.without_engines(num_ranks=num_ranks, num_devices=num_gpus)
    devices = args.vllm_devices
    assert not isinstance(devices, str)
    assert args.num_vllm_gpus is not None
    if num_gpus is None:
        return Placement.on_cpu(
            num_ranks=num_ranks,
            num_engines=args.num_vllm_gpus,
            num_cores=len(available_cores()),
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            devices=devices,
        )
    placement = Placement.on_gpus(
        num_ranks=num_ranks,
        num_engines=args.num_vllm_gpus,
        num_devices=num_gpus,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        devices=devices,
    )
    if placement.shared_devices:
        shared = ", ".join(map(str, placement.shared_devices))
        if args.vllm_gpu_memory_utilization is None:
            raise PlacementError(
                f"vllm_devices puts an engine on GPU {shared}, which also trains, so its memory must be shared out: "
                "set vllm_gpu_memory_utilization (for instance 0.3)."
            )
        logger.warning(
            "GPU %s trains and generates; the engine there may use %.0f %% of its memory.",
            shared,
            100 * args.vllm_gpu_memory_utilization,
        )
    return placement


def count_gpus(args: GRPOConfig) -> int | None:
    """GPUs the runtime counts (after CUDA_VISIBLE_DEVICES, however that is written); None when training on the CPU."""
    return torch.cuda.device_count() if args.device.type == "cuda" else None


def available_cores() -> list[int]:
    """Numbers of the CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_nodes() -> int:
    """Machines of the launch, from the launcher's variables."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // local) if local else 1


def engine_dtype(args: GRPOConfig, policy_dtype: torch.dtype) -> str:
    """The engine's number type: the asked one, else the one the policy computes in."""
    if args.vllm_dtype is not None:
        known = ("float32", "bfloat16", "float16")
        if args.vllm_dtype not in known:
            raise ConfigError(f"vllm_dtype={args.vllm_dtype!r} is unknown. Use one of: {', '.join(known)}.")
        return args.vllm_dtype
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 else str(policy_dtype).removeprefix("torch.")


def engine_seed(run_seed: int, engine: int, batch: int) -> int:
    """A seed that differs by run, engine and generation batch, so that no two streams of samples repeat."""
    return zlib.crc32(f"{run_seed}/{engine}/{batch}".encode()) % 2**31


def checkpoint_shapes(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a checkpoint of this configuration (a tied head is its embedding)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parts = checkpoint_parts(model, [(name, parameter.shape) for name, parameter in model.named_parameters()])
    return {part.name: torch.Size(part.size) for found in parts.values() for part in found}


def build_engine(args: GRPOConfig, placement: Placement, collectives: Collectives, facts: PolicyFacts) -> Engine | None:
    """Builds the engine (or shard) that this rank hosts; every rank must call it.

    Args:
        args: the run's configuration.
        placement: who hosts what.
        collectives: of the training ranks.
        facts: of the policy.

    Returns:
        The engine, or None on a rank without one.
    """
    shard = placement.shard_of(collectives.rank)
    engine: Engine | None = None
    for first in (True, False):  # engine 0 compiles and fills the cache on disk, from which the others start together
        meets = placement.tensor_parallel_size > 1 and shard is not None and shard.index == 0
        ports = collectives.gather_objects(_free_port() if meets else None)  # just before it is used
        with collectives.failing_together("building engines"):
            if shard is not None and (shard.engine == 0) is first:
                spec = _engine_spec(args, placement, shard, facts, ports[placement.host_of(shard.engine)])
                engine = _start(spec, in_child=backend.needs_child(args))
    return engine


def _start(spec: EngineSpec, *, in_child: bool) -> Engine:
    """The engine in this process, or in a child of it where it must not, or cannot, live beside the policy."""
    if not in_child:
        try:
            return VllmEngine(spec, beside_policy=True)
        except NeedsOwnProcessError as reason:
            logger.warning("%s So the engine lives in a child process.", reason)
    return BackgroundEngine(spec)


def policy_engine(
    args: GRPOConfig,
    placement: Placement,
    rank: int,
    policy: PreTrainedModel,
    autocast: Callable[[], AbstractContextManager[Any]],
    window: int | None,
) -> Engine:
    """The engine of a run with ``use_vllm=False``: this rank's policy itself.

    Args:
        args: the run's configuration.
        placement: of a run without engines.
        rank: this rank.
        policy: unwrapped.
        autocast: makes the mixed-precision context of a forward pass.
        window: context window in tokens, or None for no limit.
    """
    return TransformersEngine(
        policy,
        seed=engine_seed(args.seed, rank, 0),
        autocast=autocast,
        max_num_seqs=_num_seqs(args, placement),
        max_model_length=window,
        options={} if args.cache_implementation is None else {"cache_implementation": args.cache_implementation},
    )


def _engine_spec(
    args: GRPOConfig, placement: Placement, shard: Shard, facts: PolicyFacts, port: int | None
) -> EngineSpec:
    on_gpu = args.device.type == "cuda"
    dtype = engine_dtype(args, facts.dtype)
    num_seqs = _num_seqs(args, placement)
    checkpoint = checkpoint_shapes(facts.config, args.trust_remote_code)
    share = args.vllm_gpu_memory_utilization or DEDICATED_MEMORY_SHARE
    kv_cache = None
    named = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & dictionary(args.vllm_engine_kwargs).keys()
    if on_gpu and not named:
        tokens = num_seqs * (facts.longest_prompt + args.max_completion_length)
        value_bytes = 4 if dtype == "float32" else 2
        weights = value_bytes * sum(shape.numel() for shape in checkpoint.values())
        device_bytes = torch.cuda.get_device_properties(shard.device).total_memory
        kv_cache = kv_cache_bytes(
            facts.config,
            num_tokens=max(tokens, facts.window or 0),
            value_bytes=value_bytes,
            tensor_parallel_size=placement.tensor_parallel_size,
            room_bytes=int(share * device_bytes) - weights // placement.tensor_parallel_size,
        )
    return EngineSpec(
        model_config=facts.config,
        checkpoint=checkpoint,
        dtype=dtype,
        device=shard.device if on_gpu else None,
        seed=engine_seed(args.seed, shard.engine, 0),
        max_model_length=facts.window,
        max_num_seqs=num_seqs,
        gpu_memory_utilization=share,
        enforce_eager=args.vllm_enforce_eager if args.vllm_enforce_eager is not None else not on_gpu,
        cpu_cores=None if on_gpu else _cores_of(placement, shard),
        tensor_parallel_size=placement.tensor_parallel_size,
        shard=shard.index,
        shard_devices=tuple(s.device for s in placement.shards if s.engine == shard.engine and s.device is not None),
        kv_cache_bytes=kv_cache,
        port=port,
        model_impl=args.vllm_model_impl,
        tokenizer=facts.tokenizer if backend.needs_tokenizer(args) else None,
        extra=dictionary(args.vllm_engine_kwargs),
        lora=facts.lora,
    )


def kv_cache_bytes(
    config: Any, *, num_tokens: int, value_bytes: int, tensor_parallel_size: int, room_bytes: int
) -> int | None:
    """A KV cache that holds the work at hand with a quarter to spare, or None where the device decides.

    A larger one would cost time: vLLM walks over all its blocks at every weight sync.

    Args:
        config: the policy's configuration.
        num_tokens: that may be alive at once.
        value_bytes: of one cached number.
        tensor_parallel_size: shards that divide the key/value heads.
        room_bytes: what the engine may take of its device, without its weights.

    Returns:
        None when the cache would take more than half of the room: what vLLM measures is the better limit then.
    """
    shape = DecoderShape.of(config)
    kv_heads = max(1, shape.num_kv_heads // tensor_parallel_size)
    per_token = 2 * shape.num_layers * kv_heads * shape.head_size * value_bytes
    wanted = int(1.25 * per_token * num_tokens)
    return wanted if wanted <= room_bytes // 2 else None


def shared_capacity(args: GRPOConfig, placement: Placement) -> int | None:
    """Completions that an engine decodes at once, beyond which engines may take work from each other.

    None for engines of several shards: all shards of an engine must get the same prompts in the same order.
    """
    return None if placement.tensor_parallel_size > 1 else _num_seqs(args, placement)


def _num_seqs(args: GRPOConfig, placement: Placement) -> int:
    """``vllm_max_num_seqs``, by default an engine's share of the generation batch, at most 1024."""
    if args.vllm_max_num_seqs is not None:
        return args.vllm_max_num_seqs
    prompts = max(len(span) for span in split_evenly(args.prompts_per_batch, placement.num_engines))
    return max(1, min(prompts * args.num_generations, 1024))


def _cores_of(placement: Placement, shard: Shard) -> str | None:
    """The cores an engine on CPU binds to: the one the user named, else its host's even share of the machine's."""
    cores = available_cores()
    if shard.device is not None:
        return str(cores[shard.device])
    if placement.num_ranks > len(cores):
        return None  # ranks share cores: leave the scheduling to the system
    share = split_evenly(len(cores), placement.num_ranks)[shard.local_rank]
    return ",".join(str(cores[position]) for position in share)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
