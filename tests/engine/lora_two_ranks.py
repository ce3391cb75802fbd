"""Worker of test_lora_two_ranks.py: two ranks train an adapter, and one engine of two shards follows it.

Run as ``python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.engine.lora_two_ranks OUT``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
from peft import LoraConfig

from colocate_rl import GRPOConfig, GRPOTrainer
from tests.engine.two_ranks import low_ids
from tests.lora import LINEAR
from tests.tiny import tiny_model, tiny_tokenizer


def train(out: Path, way: str) -> dict[str, Any]:
    args = GRPOConfig(
        str(out / way),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=4,
        logging_steps=1,
        learning_rate=3e-2,
        save_strategy="no",
        disable_tqdm=True,
        beta=0.02,
        num_vllm_gpus=1,
        vllm_tensor_parallel_size=2,
        lora_sync=way,
    )
    rows = datasets.Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(24)]})
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=list(LINEAR), modules_to_save=["norm"])
    trainer = GRPOTrainer(tiny_model(), low_ids, args, rows, processing_class=tiny_tokenizer(), peft_config=lora)
    trainer.train()
    trainer.close()
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    return {
        "logs": [log for log in trainer.state.log_history if "step_time" in log],
        "adapter": [float(weight.double().sum()) for weight in trained],
    }


def main(out: Path) -> None:
    result = {way: train(out, way) for way in ("merged", "adapter")}
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
