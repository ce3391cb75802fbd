"""Worker of test_two_ranks.py: two NCCL ranks train, their engines (or one engine's shards) on each other's GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch

from colocate_rl import GRPOConfig, GRPOTrainer
from tests.gpu.conftest import gpu_model
from tests.tiny import tiny_tokenizer


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def main(out: Path) -> None:
    result: dict[str, Any] = {}
    rows = datasets.Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(64)]})
    for name, settings in {"K=2": {"num_vllm_gpus": 2}, "t=2": {"vllm_tensor_parallel_size": 2}}.items():
        args = GRPOConfig(
            str(out / name),
            vllm_devices=[1, 0],
            vllm_gpu_memory_utilization=0.2,
            vllm_enforce_eager=True,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=32,
            max_steps=20,
            logging_steps=1,
            learning_rate=1e-4,
            save_strategy="no",
            disable_tqdm=True,
            **settings,  # type: ignore[arg-type]
        )
        trainer = GRPOTrainer(gpu_model(torch.float32), low_ids, args, rows, processing_class=tiny_tokenizer())
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        result[name] = {
            "weights": [float(parameter.double().sum()) for parameter in model.parameters()],
            "logs": [log for log in trainer.state.log_history if "step_time" in log],
            "device": torch.cuda.current_device(),
            "group works": trainer.collectives.sum(torch.ones(1)).item() == 2.0,
            "engine on": sorted({p.device.index for p in trainer.engine._model.parameters()}),  # type: ignore[union-attr]
        }
        trainer.close()
    (out / f"rank{trainer.collectives.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
