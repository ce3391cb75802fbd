"""Worker: one split of this library, one process per rank; started by compare_splits.py.

By hand, on 2 GPUs:
    accelerate launch --num_processes 1 -m benchmarks.run_ours --num-vllm-gpus 1 \\
        --work work.json --model FOLDER --output OUT
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.processes import MemoryWatch
from benchmarks.work import Work, even_ids, make_dataset
from benchmarks.worker import errors_into, joined_memory, own_memory, shared_settings, versions, write_result

MODULE = "benchmarks.run_ours"
NAMES = {
    "step_s": "step_time",
    "generate_s": "time/generate_s",
    "score_s": "time/score_s",
    "train_s": "time/train_s",
    "sync_s": "time/sync_s",
    "idle_train": "time/idle_train",
    "idle_generate": "time/idle_generate",
    "overlap_efficiency": "time/overlap_efficiency",
    "logprob_gap": "sampling/sampling_logp_difference/mean",
}


def parse() -> argparse.Namespace:
    """The worker's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="file written by Work.save")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-vllm-gpus", type=int, required=True)
    parser.add_argument("--vllm-devices", help="as in 1,0: engines share devices with the training ranks")
    parser.add_argument("--vllm-memory", type=float, help="vllm_gpu_memory_utilization")
    parser.add_argument("--settings", default="{}", help="JSON: further GRPOConfig settings; they win")
    return parser.parse_args()


def settings(arguments: argparse.Namespace, work: Work, num_ranks: int, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of ``GRPOConfig`` for this work and split."""
    return {
        **shared_settings(work, arguments.output, num_ranks),
        "num_vllm_gpus": arguments.num_vllm_gpus,
        "vllm_devices": arguments.vllm_devices,
        "vllm_gpu_memory_utilization": arguments.vllm_memory,
        "bf16": on_gpu,
        "log_timeline": True,
        **json.loads(arguments.settings),
    }


def record(logs: dict[str, Any]) -> dict[str, Any]:
    """One step's figures from one log entry."""
    engines = sorted({int(name.split("/")[1]) for name in logs if name.startswith("engine/")})
    return {
        "step": logs["step"],
        **{name: logs.get(key) for name, key in NAMES.items()},
        "engine_generate_s": [logs[f"engine/{engine}/generate_s"] for engine in engines],
        "sampled_tokens": sum(logs[f"engine/{engine}/tokens"] for engine in engines),
    }


def main() -> None:
    """Trains the asked steps; rank 0 writes the result."""
    arguments = parse()
    rank = int(os.environ.get("RANK", 0))
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    arguments.output.mkdir(parents=True, exist_ok=True)
    readings = MemoryWatch(arguments.output / "nvidia_smi.csv", enabled=rank == 0)
    with errors_into(arguments.output, rank), readings as watch:
        work = Work.load(arguments.work)
        import torch
        from accelerate.utils import gather_object
        from transformers import AutoTokenizer

        from colocate_rl import GRPOConfig, GRPOTrainer

        on_gpu = torch.cuda.is_available()
        args = GRPOConfig(**settings(arguments, work, num_ranks, on_gpu))
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
        trainer = GRPOTrainer(
            str(arguments.model), even_ids, args, make_dataset(work, tokenizer), processing_class=tokenizer
        )
        trainer.train()
        parts = gather_object([own_memory()])
        if rank == 0:
            records = [record(logs) for logs in trainer.state.log_history if "step_time" in logs]
            write_result(
                arguments.output,
                records=records,
                num_ranks=num_ranks,
                micro_batch=args.per_device_train_batch_size,
                micro_batches=args.gradient_accumulation_steps,
                memory=joined_memory(parts, watch.peaks_gib()),
                versions=versions(),
                placement=str(trainer.placement),
            )
        trainer.close()


if __name__ == "__main__":
    main()
