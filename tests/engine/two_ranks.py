"""Worker of test_two_ranks.py: two ranks train a tiny model with real engines, one scenario after the other.

Run as ``python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.engine.two_ranks OUT``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist  # noqa: TID251
from transformers import TrainerCallback

from colocate_rl import GRPOConfig, GRPOTrainer
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.rollout.records import RolloutBatch
from tests.engine.conftest import prompts
from tests.tiny import tiny_model, tiny_tokenizer


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Recorder(TrainerCallback):
    """Keeps the gradients of the first step."""

    gradients: dict[str, torch.Tensor] | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.gradients is None:
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


class RecordingTrainer(GRPOTrainer):
    """Keeps the rows of every rollout."""

    rollouts: list[list[list[int]]]
    versions: set[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        roll_out = self._slices.roll_out
        self._slices.roll_out = lambda *args: self.record(roll_out(*args))  # type: ignore[method-assign]

    def record(self, parts: list[RolloutBatch]) -> list[RolloutBatch]:
        self.__dict__.setdefault("rollouts", [])
        self.__dict__.setdefault("versions", set()).add(self.weight_sync._version)
        ids = [
            row[mask].tolist() for part in parts for row, mask in zip(part.input_ids, part.attention_mask, strict=True)
        ]
        self.rollouts.append(sorted(ids))
        return parts


def train(out: Path, **settings: Any) -> tuple[RecordingTrainer, Recorder]:
    values: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_per_request_seeds": True,
        "beta": 0.02,
    }
    recorder = Recorder()
    rows = datasets.Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(24)]})
    trainer = RecordingTrainer(
        tiny_model(),
        low_ids,
        GRPOConfig(**{**values, **settings}),
        rows,
        processing_class=tiny_tokenizer(),
        callbacks=[recorder],
    )
    trainer.train()
    return trainer, recorder


def fingerprint(trainer: GRPOTrainer) -> list[float]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def greedy(trainer: GRPOTrainer) -> list[Any]:
    if trainer.engine is None:
        return []
    trainer.engine.load_weights([(n, p.detach()) for n, p in tiny_model().named_parameters()])
    answers = trainer.engine.generate(
        [Request(prompt, 1) for prompt in prompts(6)], SamplingSpec(max_tokens=16, temperature=0.0)
    )
    return [[list(answer[0].token_ids), list(answer[0].sampling_logprobs)] for answer in answers]


def loads(trainer: RecordingTrainer) -> int:
    """Policy versions that reached the engines."""
    return len(trainer.versions)


def group_works() -> bool:
    """Makes a process group beside the engine, as a trainer may do at any time."""
    one = torch.ones(1)
    dist.all_reduce(one, group=dist.new_group([0, 1]))
    return one.item() == 2.0


def main(out: Path) -> None:
    result: dict[str, Any] = {}
    scenarios: dict[str, dict[str, Any]] = {
        "K=1": {"num_vllm_gpus": 1},
        "K=2": {"num_vllm_gpus": 2},
        "t=2": {"num_vllm_gpus": 1, "vllm_tensor_parallel_size": 2, "max_steps": 4},
        "long": {"num_vllm_gpus": 2, "max_steps": 20, "vllm_per_request_seeds": False, "num_iterations": 2},
    }
    for name, settings in scenarios.items():
        trainer, recorder = train(out / name, **settings)
        assert recorder.gradients is not None
        result[name] = {
            "rollouts": trainer.rollouts,
            "gradients": {name: gradient.flatten().tolist() for name, gradient in recorder.gradients.items()},
            "weights": fingerprint(trainer),
            "logs": trainer.state.log_history,
            "loads": loads(trainer),
            "greedy": greedy(trainer),
            "group works": group_works(),
        }
        trainer.close()
    rank = trainer.collectives.rank
    (out / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
