"""What the trainer takes for old log-probabilities, wherever a run stands within its generation batches."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.resume import file_name
from colocate_rl.rollout.records import RolloutBatch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = pytest.mark.timeout(120)


class CountingEngine(LengthyEngine):
    """Also counts weight loads."""

    loads = 0

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.loads += 1


class CheckingTrainer(GRPOTrainer):
    """Compares the old log-probabilities used in each loss with the policy's at the time of the rollout."""

    checked: int = 0
    moved: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        roll_out = self._slices.roll_out

        def remember(*args: Any) -> list[RolloutBatch]:
            parts = roll_out(*args)
            self.__dict__["truth"] = [self._objective.logprobs(self.model, part) for part in parts]
            return parts

        self._slices.roll_out = remember  # type: ignore[method-assign]

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        position, batch = inputs
        live = self._objective.logprobs(self.model, batch)
        used = live if batch.old_logprobs is None else batch.old_logprobs
        truth = self.__dict__["truth"][position]
        torch.testing.assert_close(used, truth, rtol=0, atol=1e-5)
        self.moved += int(not torch.allclose(live, truth, atol=1e-4))
        self.checked += 1
        return super().compute_loss(model, inputs, *args, **kwargs)


def make(folder: Path, **changes: Any) -> CheckingTrainer:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 32,
        "learning_rate": 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "vllm_logprob_gap_limit": 0,
    }
    prompts = datasets.Dataset.from_dict({"prompt": [f"{number}=" for number in range(9)]})
    args = GRPOConfig(str(folder), **{**values, **changes})
    held_out = None if args.eval_strategy == "no" else datasets.Dataset.from_dict({"prompt": ["1=", "2="]})
    return CheckingTrainer(tiny_model(), even_ids, args, prompts, held_out, processing_class=tiny_tokenizer())


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: CountingEngine())


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("steps_per_generation", "accumulation"), [(1, 1), (4, 1), (4, 2), (3, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_old_logprobs_are_the_policys_at_rollout(
    tmp_path: Path, steps_per_generation: int, accumulation: int, num_iterations: int
) -> None:
    settings = {
        "steps_per_generation": steps_per_generation,
        "gradient_accumulation_steps": accumulation,
        "num_iterations": num_iterations,
    }
    whole = make(tmp_path, **settings)
    whole.train()
    batches = 9 // steps_per_generation
    assert whole.checked == 2 * batches * steps_per_generation * num_iterations
    if steps_per_generation * num_iterations > accumulation:
        assert whole.moved > 0
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / file_name(0)).unlink()  # so that a batch in use is generated again
        resumed = make(tmp_path, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.checked > 0
        assert resumed.state.global_step == whole.state.global_step


@pytest.mark.usefixtures("scripted")
def test_a_second_run_of_one_trainer_starts_from_the_current_weights(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    assert isinstance(trainer.engine, CountingEngine)
    assert trainer.engine.loads == 1
    trainer.train()
    assert trainer.engine.loads == 2


class Chatty(TrainerCallback):
    """Logs from within the trainer's own steps, logs, saves and evaluations, as a user may on one rank alone."""

    trainer: CheckingTrainer
    busy = False

    def say(self, *_: Any, **__: Any) -> None:
        if not self.busy:
            self.busy = True
            self.trainer.log({"mine": 1.0})
            self.busy = False

    on_step_end = on_log = on_save = on_evaluate = on_train_end = say  # type: ignore[assignment]


@pytest.mark.usefixtures("scripted")
def test_only_the_trainers_own_logs_join_ranks(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2)
    chatty = Chatty()
    chatty.trainer = trainer
    trainer.add_callback(chatty)
    joined: list[str] = []
    together = trainer.collectives.failing_together

    def record(phase: str) -> Any:
        joined.append(phase)
        return together(phase)

    trainer.collectives.failing_together = record  # type: ignore[method-assign]
    prediction = trainer.predict(trainer.eval_dataset)
    assert prediction.metrics["test_reward"] >= 0
    assert joined.count("writing the log") == 0
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kinds = ["eval" if "eval_reward" in r else "step" if "reward" in r else "end" for r in records]
    assert kinds == ["step", "eval"] * 3 + ["end"]
    assert joined.count("writing the log") == len(records)
    assert not any("mine" in record for record in records)
    assert sum("mine" in line for line in trainer.state.log_history) > 6


class Evaluating(TrainerCallback):
    """Evaluates after each step by itself."""

    trainer: CheckingTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(datasets.Dataset.from_dict({"prompt": ["1=", "2="]}))


@pytest.mark.usefixtures("scripted")
def test_an_evaluation_from_a_callback_leaves_the_log_of_its_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=3, per_device_eval_batch_size=2)
    evaluating = Evaluating()
    evaluating.trainer = trainer
    trainer.add_callback(evaluating)
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "reward" in record] == [1, 2, 3]
    assert [record["step"] for record in records if "eval_reward" in record] == [1, 2, 3]
