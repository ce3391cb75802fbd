"""Worker of test_dialogue_ranks.py: two ranks, real engines, completions of more than one turn.

Run as ``python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.engine.dialogue_ranks OUT``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
from transformers import TrainerCallback

from colocate_rl import GRPOConfig, GRPOTrainer
from colocate_rl.rollout.records import RolloutBatch
from tests.tiny import chat_tokenizer, tiny_model

WINDOW = 512
LIMIT = 220
CALL = r'<tool_call>\{"name": "double", "arguments": \{"x": [0-9]\}\}</tool_call>'


async def double(x: int) -> int:
    """Doubles a digit.

    Args:
        x: the digit.
    """
    if x == 7:
        raise ValueError("seven is not for sale")
    return 2 * x


def ask_twice(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """A turn, an environment's word, and another turn; only rows with an even first id go on."""
    tokenizer = chat_tokenizer()
    first = trainer.generate(prompts, max_tokens=4)
    word = tokenizer(" and?")["input_ids"]
    onward = [place for place, ids in enumerate(first["completion_ids"]) if ids and ids[0] % 2 == 0]
    asked = [first["prompt_ids"][n] + first["completion_ids"][n] + word for n in onward]
    second = trainer.generate(asked, max_tokens=4)
    masks = [[1] * len(ids) for ids in first["completion_ids"]]
    for n, ids, logprobs in zip(onward, second["completion_ids"], second["logprobs"], strict=True):
        first["completion_ids"][n] += word + ids
        first["logprobs"][n] += [0.0] * len(word) + logprobs
        masks[n] += [0] * len(word) + [1] * len(ids)
    return {**first, "env_mask": masks, "went_on": [n in onward for n in range(len(prompts))]}


def count_calls(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


def went_on(completions: list[Any], went_on: list[bool], **_: Any) -> list[float]:
    return [float(on) for on in went_on]


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Recorder(TrainerCallback):
    """Keeps the gradients of the first step."""

    gradients: dict[str, Any] | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.gradients is None:
            self.gradients = {n: p.grad.flatten().tolist() for n, p in model.named_parameters()}


class RecordingTrainer(GRPOTrainer):
    """Keeps the rows of every rollout: ids, which were sampled, log-probabilities, advantage."""

    rows: list[list[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        roll_out = self._slices.roll_out
        self._slices.roll_out = lambda *args: self.record(roll_out(*args))  # type: ignore[method-assign]

    def record(self, parts: list[RolloutBatch]) -> list[RolloutBatch]:
        found = []
        for part in parts:
            for n in range(part.num_rows):
                own = part.attention_mask[n]
                values = (part.input_ids, part.loss_mask, part.sampling_logprobs)
                found.append([*(value[n][own].tolist() for value in values), float(part.advantages[n])])
        self.__dict__.setdefault("rows", []).append(sorted(found))
        return parts


SCENARIOS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "tools K=1": (count_calls, {"num_vllm_gpus": 1}, {"tools": [double]}),
    "tools K=2": (count_calls, {"num_vllm_gpus": 2}, {"tools": [double]}),
    "tools ahead": (
        count_calls,
        {"num_vllm_gpus": 2, "overlap": "one_step", "max_steps": 3},
        {"tools": [double]},
    ),
    "custom": (went_on, {"num_vllm_gpus": 2, "temperature": 1.0}, {"rollout_func": ask_twice}),
    "policy": (low_ids, {"use_vllm": False, "max_completion_length": 8}, {}),
}


def train(out: Path, reward: Any, settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": LIMIT,
        "temperature": 2.0,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_per_request_seeds": True,
        "vllm_max_model_length": WINDOW,
    }
    if "tools" in arguments:
        values["vllm_structured_outputs_regex"] = rf"{CALL}|[07]"
        values["vllm_importance_sampling_correction"] = False  # it would undo what the expression did
    prompts = [[{"role": "user", "content": f"double {number}"}] for number in range(12)]
    if "tools" not in arguments:
        prompts = [messages[0]["content"] for messages in prompts]  # type: ignore[misc]
    recorder = Recorder()
    trainer = RecordingTrainer(
        tiny_model(max_position_embeddings=WINDOW),
        reward,
        GRPOConfig(**{**values, **settings}),
        datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=chat_tokenizer(),
        callbacks=[recorder],
        **arguments,
    )
    trainer.train()
    weights = [float(p.detach().double().sum()) for p in trainer.accelerator.unwrap_model(trainer.model).parameters()]
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    trainer.close()
    return {"rows": trainer.rows, "logs": logs, "weights": weights, "gradients": recorder.gradients}


def main(out: Path) -> None:
    results = {}
    for name, (reward, settings, arguments) in SCENARIOS.items():
        results[name] = train(out / name, reward, settings, arguments)
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
