"""How fast the policy's weights reach an engine on another GPU, and how near that is to a plain copy. Needs 2 GPUs.

    python benchmarks/weight_sync.py                                    # shapes 0.5b, 1.5b, 7b; bfloat16 and float32
    python benchmarks/weight_sync.py --shapes qwen2-1.5b --policy-dtypes bfloat16

Per shape, in a process of its own: a random policy on GPU 0 and one engine on GPU 1, then
  first         our load_weights the first time, which records and checks the copy plan
  ours          our load_weights afterwards (median of 10)
  vllm          the engine model's own load_weights (median of 5)
  flat copy     one copy of as many bytes as the engine takes: the ceiling (median of 10)
GB/s count the bytes the engine takes (bfloat16), also for a float32 policy. Writes results.json into --output.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from benchmarks import lora_sync
from benchmarks.processes import RunError, child_environment, run
from benchmarks.results import console_of
from benchmarks.work import SHAPES, shape_config, write_json

DTYPES = ("bfloat16", "float32")


def timed(action: Callable[[], object], devices: tuple[int, ...]) -> float:
    """Seconds of one call, with nothing left running on the devices before and after."""
    import torch

    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def repeated(action: Callable[[], object], devices: tuple[int, ...], count: int) -> float:
    """Median seconds of ``count`` calls."""
    return statistics.median(timed(action, devices) for _ in range(count))


def build_engine(config: Any, device: int, **changes: Any) -> Any:
    """One engine with dummy weights and a small cache; ``changes`` are further fields of ``EngineSpec``."""
    from colocate_rl.engine.spec import EngineSpec
    from colocate_rl.engine.vllm_engine import VllmEngine
    from colocate_rl.engines import checkpoint_shapes

    sizes = {"max_model_length": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.3, "enforce_eager": True}
    return VllmEngine(
        EngineSpec(
            model_config=config,
            checkpoint=checkpoint_shapes(config, trust_remote_code=False),
            dtype="bfloat16",
            device=device,
            seed=0,
            **{**sizes, **changes},
        )
    )


def check_arrival(engine: Any, weights: dict[str, Any]) -> None:
    """Compares two of the engine's tensors with the policy's."""
    import torch

    found = dict(engine._model.named_parameters())
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        sent = weights[name].to(found[name].device, found[name].dtype)
        if not torch.equal(found[name][: sent.shape[0]], sent):
            raise RunError(f"{name} did not arrive in the engine as it was sent.")


def measure(shape: str, dtypes: list[str], trainer: int, host: int) -> list[dict[str, Any]]:
    """All figures of one shape: one entry per policy type."""
    import torch
    from transformers import AutoModelForCausalLM

    from colocate_rl.training.merging import policy_tensors

    config = shape_config(shape)
    torch.manual_seed(0)
    with torch.device("cuda", trainer):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_bytes = 2 * sum(parameter.numel() for parameter in policy.parameters())
    engine = build_engine(config, host)
    rows = []
    for dtype in dtypes:
        policy.to(getattr(torch, dtype))
        weights = [(tensor.name, tensor.base()) for tensor in policy_tensors(policy)]
        rows.append({"policy_dtype": dtype, **measure_sync(engine, weights, (trainer, host))})
    engine.close()
    del policy
    torch.cuda.empty_cache()
    flat = flat_copy(num_bytes, trainer, host)
    rows = [{"shape": shape, "num_bytes": num_bytes, **row, "flat_s": flat} for row in rows]
    return [{**row, **rates(row)} for row in rows]


def measure_sync(engine: Any, weights: list[tuple[str, Any]], devices: tuple[int, ...]) -> dict[str, Any]:
    """Our sync and vLLM's, of one policy into one engine."""
    engine._plan = None  # a new type of policy gets a plan of its own
    first = timed(lambda: engine.load_weights(weights), devices)
    check_arrival(engine, dict(weights))
    ours = repeated(lambda: engine.load_weights(weights), devices, 10)
    return {
        "num_tensors": len(weights),
        "num_copies": len(engine._plan.copies),
        "first_s": first,
        "ours_s": ours,
        "vllm_s": vllm_seconds(engine, weights, devices),
    }


def vllm_seconds(engine: Any, weights: list[tuple[str, Any]], devices: tuple[int, ...]) -> float | None:
    """Seconds of the model's own loader; None where this vLLM cannot load twice."""
    import torch

    with engine._process.entered(), torch.no_grad():
        try:
            return repeated(lambda: engine._model.load_weights(list(weights)), devices, 5)
        except (AttributeError, ValueError) as error:
            print(f"vLLM's own load_weights failed: {error}", file=sys.stderr)
            return None


def flat_copy(num_bytes: int, trainer: int, host: int) -> float:
    """Median seconds of one contiguous copy between the devices, after a first one that maps the memory."""
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=torch.device("cuda", trainer))
    target = torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", host))
    target.copy_(source)
    return repeated(lambda: target.copy_(source, non_blocking=True), (trainer, host), 10)


def rates(row: dict[str, Any]) -> dict[str, Any]:
    """GB/s of each way, and shares of the ceiling."""
    ways = {way: row[f"{way}_s"] for way in ("ours", "vllm", "flat")}
    speed = {f"{way}_gb_s": None if not value else row["num_bytes"] / value / 1e9 for way, value in ways.items()}
    shares = {f"{way}_share": None if not ways[way] else ways["flat"] / ways[way] for way in ("ours", "vllm")}
    return {**speed, **shares}


def milliseconds(value: float | None) -> str:
    """Readable time."""
    return "-" if value is None else f"{1000 * value:.1f}"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints one line per shape and policy type."""
    table = Table(title="Weight sync, GPU to GPU: milliseconds (GB/s)")
    for name in ("shape", "policy", "GB", "copies", "first", "ours", "vLLM's own", "flat copy", "ours / flat"):
        table.add_column(name, justify="left" if name in ("shape", "policy") else "right", no_wrap=True)

    def cell(row: dict[str, Any], way: str) -> str:
        speed = row[f"{way}_gb_s"]
        return "-" if speed is None else f"{milliseconds(row[f'{way}_s'])} ({speed:.0f})"

    for row in rows:
        table.add_row(
            row["shape"],
            row["policy_dtype"],
            f"{row['num_bytes'] / 1e9:.2f}",
            str(row["num_copies"]),
            milliseconds(row["first_s"]),
            *(cell(row, way) for way in ("ours", "vllm", "flat")),
            f"{100 * row['ours_share']:.0f} %",
        )
    console_of(120).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    shapes = [shape for shape in SHAPES if shape != "tiny"]
    add("--shapes", nargs="+", choices=SHAPES, default=shapes, help=f"default: {' '.join(shapes)}")
    add("--policy-dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    add("--trainer-device", type=int, default=0, help="GPU of the policy (default: 0)")
    add("--engine-device", type=int, default=1, help="GPU of the engine (default: 1)")
    add("--lora-rank", type=int, metavar="R", help="measure a LoRA adapter of this rank instead (lora_sync.py)")
    add("--eager", action="store_true", help="--lora-rank: engines without CUDA graphs, which start in seconds")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds a shape may take (default: 300)")
    add("--output", type=Path, default=Path("runs/weight_sync"), help="folder (default: runs/weight_sync)")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measures every shape; returns 1 when none could be."""
    options = parse(arguments)
    import torch

    if options.worker is not None:
        devices = (options.trainer_device, options.engine_device)
        if options.lora_rank is not None:
            rows = lora_sync.measure(options.shapes[0], options.lora_rank, *devices, eager=options.eager)
        else:
            rows = measure(options.shapes[0], options.policy_dtypes, *devices)
        write_json(options.worker, {"rows": rows})
        return 0
    if torch.cuda.device_count() <= max(options.trainer_device, options.engine_device):
        print(
            f"benchmarks: error: weight_sync.py copies between two GPUs (numbers {options.trainer_device} and "
            f"{options.engine_device}), but torch sees {torch.cuda.device_count()}.",
            file=sys.stderr,
        )
        return 1
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    names = [torch.cuda.get_device_name(device) for device in (options.trainer_device, options.engine_device)]
    rows, errors = [], {}
    for shape in options.shapes:
        print(f"Measuring {shape} ...", flush=True)
        part = output / f"{shape}.json"
        words = ["--worker", str(part), "--shapes", shape, "--policy-dtypes", *options.policy_dtypes]
        words += ["--trainer-device", str(options.trainer_device), "--engine-device", str(options.engine_device)]
        words += [] if options.lora_rank is None else ["--lora-rank", str(options.lora_rank)]
        words += ["--eager"] if options.eager else []
        command = [sys.executable, "-m", "benchmarks.weight_sync", *words]
        try:
            run(command, output / f"{shape}.log", child_environment(), options.timeout)
            rows += json.loads(part.read_text())["rows"]
        except RunError as error:
            errors[shape] = str(error)
            print(f"  failed: {error}", flush=True)
        result = {"devices": names, "torch": torch.__version__, "rows": rows, "errors": errors}
        write_json(output / "results.json", result)
    if rows:
        (print_rows if options.lora_rank is None else lora_sync.print_rows)(rows)
    print(f"Written: {output / 'results.json'}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
