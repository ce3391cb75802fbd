"""Which rank hosts which engine on which device: pure arithmetic, so that every size can be tested.

A node with D devices runs W training ranks on devices 0..W-1 and K engines of tensor-parallel size t on the K*t
devices after them. Shard j of engine e lives inside local rank e*t+j. Called by the trainer before a model is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from colocate_rl.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor-parallel part of one engine (the whole engine when the tensor-parallel size is 1)."""

    engine: int
    index: int
    local_rank: int
    device: int | None
    """Logical device number as the runtime counts it; on CPU a core, or None for the cores of the host rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The table of ranks, engines and devices of one node."""

    num_ranks: int
    num_engines: int
    tensor_parallel_size: int
    shards: tuple[Shard, ...]
    shared_devices: tuple[int, ...] = ()
    """Devices that train and generate at once (only when the user named them)."""
    by_policies: bool = False
    """Every rank generates with its own policy; "engine" r then is rank r itself."""

    @classmethod
    def on_gpus(
        cls,
        *,
        num_ranks: int,
        num_engines: int,
        num_devices: int,
        tensor_parallel_size: int = 1,
        devices: Sequence[int] | None = None,
    ) -> "Placement":
        """Places engines on the GPUs after the training ranks, or on the GPUs that ``devices`` names.

        Args:
            num_ranks: training ranks on this node (W), rank r on device r.
            num_engines: engines on this node (K).
            num_devices: devices the runtime counts (D), not entries of an environment variable.
            tensor_parallel_size: shards per engine (t).
            devices: K*t logical device numbers in shard order; None takes W..W+K*t-1.

        Raises:
            PlacementError: with every number and a launch line that would work.
        """
        _check_counts(num_ranks, num_engines, tensor_parallel_size, num_devices)
        num_shards = num_engines * tensor_parallel_size
        if devices is None:
            _check_device_count(num_ranks, num_engines, tensor_parallel_size, num_devices)
            devices = range(num_ranks, num_ranks + num_shards)
        _check_named_devices(devices, num_shards, num_devices, "GPU")
        _check_ranks(num_ranks, num_devices)
        shared = tuple(sorted(set(devices) & set(range(num_ranks))))
        return cls._build(num_ranks, num_engines, tensor_parallel_size, list(devices), shared)

    @classmethod
    def on_cpu(
        cls,
        *,
        num_ranks: int,
        num_engines: int,
        num_cores: int,
        tensor_parallel_size: int = 1,
        devices: Sequence[int] | None = None,
    ) -> "Placement":
        """The same table on a machine without a GPU, where a "device" is a core and sharing is the normal case.

        Raises:
            PlacementError: as for GPUs, except that ranks and engines may share cores.
        """
        _check_counts(num_ranks, num_engines, tensor_parallel_size, None)
        num_shards = num_engines * tensor_parallel_size
        if devices is not None:
            _check_named_devices(devices, num_shards, num_cores, "CPU core")
            return cls._build(num_ranks, num_engines, tensor_parallel_size, list(devices), ())
        return cls._build(num_ranks, num_engines, tensor_parallel_size, [None] * num_shards, ())

    @classmethod
    def without_engines(cls, *, num_ranks: int, num_devices: int | None) -> "Placement":
        """No engines: every rank generates with its own policy, where it trains.

        Args:
            num_ranks: training ranks on this node (W).
            num_devices: GPUs that the runtime counts; None on CPU.

        Raises:
            PlacementError: for more ranks than GPUs.
        """
        _check_ranks(num_ranks, num_devices)
        devices = [None if num_devices is None else rank for rank in range(num_ranks)]
        return replace(cls._build(num_ranks, num_ranks, 1, devices, ()), by_policies=True)

    @classmethod
    def _build(
        cls,
        num_ranks: int,
        num_engines: int,
        tensor_parallel_size: int,
        devices: Sequence[int | None],
        shared: tuple[int, ...],
    ) -> "Placement":
        shards = tuple(
            Shard(
                engine=number // tensor_parallel_size,
                index=number % tensor_parallel_size,
                local_rank=number,
                device=device,
            )
            for number, device in enumerate(devices)
        )
        return cls(num_ranks, num_engines, tensor_parallel_size, shards, shared)

    def shard_of(self, local_rank: int) -> Shard | None:
        """The shard hosted by ``local_rank``, or None for a rank without an engine."""
        return self.shards[local_rank] if local_rank < len(self.shards) else None

    def host_of(self, engine: int) -> int:
        """Local rank of the first shard of ``engine``: the one whose results are used."""
        return engine * self.tensor_parallel_size

    def __str__(self) -> str:
        if self.by_policies:
            return f"{self.num_ranks} training rank(s), no engine: each generates with its own policy"
        lines = [f"{self.num_ranks} training rank(s), {self.num_engines} engine(s)"]
        for rank in range(self.num_ranks):
            shard = self.shard_of(rank)
            hosted = "-"
            if shard is not None:
                where = "its own cores" if shard.device is None else f"device {shard.device}"
                part = f" shard {shard.index}" if self.tensor_parallel_size > 1 else ""
                hosted = f"engine {shard.engine}{part} on {where}"
            lines.append(f"  rank {rank}: trains on device {rank}, hosts {hosted}")
        return "\n".join(lines)


def split_evenly(total: int, parts: int) -> list[range]:
    """Cuts ``range(total)`` into ``parts`` consecutive ranges whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(total, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + size + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def launch_line(num_devices: int, num_engines: int, tensor_parallel_size: int) -> str | None:
    """A launch line that uses every one of ``num_devices`` GPUs, with the asked number of engines if that fits."""
    most = num_devices // (2 * tensor_parallel_size)
    if most < 1:
        return None
    engines = min(max(num_engines, 1), most)
    ranks = num_devices - engines * tensor_parallel_size
    line = f"accelerate launch --num_processes {ranks} ... --num-vllm-gpus {engines}"
    if tensor_parallel_size > 1:
        line += f" --vllm-tensor-parallel-size {tensor_parallel_size}"
    return line


def _hint(num_devices: int | None, num_engines: int, tensor_parallel_size: int) -> str:
    if num_devices is None:
        return ""
    line = launch_line(num_devices, num_engines, tensor_parallel_size)
    if line is None:
        return (
            f" With {num_devices} GPU(s) an engine of {tensor_parallel_size} shard(s) cannot have its own: at least "
            f"{2 * tensor_parallel_size} are needed, or name shared ones with --vllm-devices and "
            "--vllm-gpu-memory-utilization."
        )
    return f" With the {num_devices} GPUs that are visible this works: {line}"


def _check_counts(num_ranks: int, num_engines: int, tensor_parallel_size: int, num_devices: int | None) -> None:
    if num_ranks < 1:
        raise PlacementError(f"{num_ranks} training ranks: at least one is needed (--num_processes).")
    if tensor_parallel_size < 1:
        raise PlacementError(f"vllm_tensor_parallel_size is {tensor_parallel_size}; it must be at least 1.")
    if num_engines < 1:
        raise PlacementError(
            f"num_vllm_gpus is {num_engines}: with no engine nothing generates completions. Set --num-vllm-gpus to at "
            f"least 1, or use_vllm=False to let each rank generate with its own policy."
            f"{_hint(num_devices, 1, tensor_parallel_size)}"
        )
    num_shards = num_engines * tensor_parallel_size
    if num_shards > num_ranks:
        most = num_ranks // tensor_parallel_size
        lower = f" or lower --num-vllm-gpus to at most {most}" if most else ""
        raise PlacementError(
            f"num_vllm_gpus={num_engines} with vllm_tensor_parallel_size={tensor_parallel_size} needs {num_shards} "
            f"training rank(s) to host the engine(s), one shard inside each, but this launch has {num_ranks}. Raise "
            f"--num_processes to at least {num_shards}{lower}."
            f"{_hint(num_devices, num_engines, tensor_parallel_size)}"
        )


def _check_ranks(num_ranks: int, num_devices: int | None) -> None:
    if num_devices is not None and num_ranks > num_devices:
        raise PlacementError(
            f"{num_ranks} training ranks need {num_ranks} GPUs but {num_devices} are visible. "
            f"Launch with --num_processes {num_devices} at most."
        )


def _check_device_count(num_ranks: int, num_engines: int, tensor_parallel_size: int, num_devices: int) -> None:
    num_shards = num_engines * tensor_parallel_size
    needed = num_ranks + num_shards
    if needed == num_devices:
        return
    numbers = (
        f"{num_ranks} training rank(s) + {num_shards} engine GPU(s) = {needed}, but {num_devices} GPU(s) are visible"
    )
    hint = _hint(num_devices, num_engines, tensor_parallel_size)
    if needed > num_devices:
        raise PlacementError(f"Too many processes for the GPUs: {numbers}. Lower --num_processes.{hint}")
    raise PlacementError(
        f"Too few processes for the GPUs: {numbers}, so {num_devices - needed} would stand idle. Raise "
        f"--num_processes, or hide the others with CUDA_VISIBLE_DEVICES.{hint}"
    )


def _check_named_devices(devices: Sequence[int], num_shards: int, num_devices: int, kind: str) -> None:
    named = ",".join(map(str, devices))
    if len(devices) != num_shards:
        raise PlacementError(
            f"vllm_devices names {len(devices)} device(s) ({named}) but num_vllm_gpus x vllm_tensor_parallel_size = "
            f"{num_shards}. Name exactly {num_shards}."
        )
    twice = sorted({device for device in devices if list(devices).count(device) > 1})
    if twice:
        raise PlacementError(
            f"vllm_devices={named} names {kind} {twice[0]} twice; two engines on one {kind} would fight for it. Name "
            f"{num_shards} different ones."
        )
    outside = [device for device in devices if not 0 <= device < num_devices]
    if outside:
        counted = " (numbers after CUDA_VISIBLE_DEVICES, not physical ones)" if kind == "GPU" else ""
        raise PlacementError(
            f"vllm_devices={named} names {kind} {outside[0]}, but the runtime counts {num_devices}: 0 to "
            f"{num_devices - 1}{counted}."
        )
