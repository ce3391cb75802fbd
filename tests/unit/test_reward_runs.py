"""Whole runs on a scripted engine: dynamic sampling, streams, workers and reward models in their places."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.errors import ConfigError
from colocate_rl.rollout.sampler import PROMPT_INDEX
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_reward_models import reward_model

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

NUM_PROMPTS = 12


class CountingUp:
    """Answers copy c of a prompt with c + 1 equal tokens; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        tokenizer = tiny_tokenizer()
        self.asked.append([tokenizer.decode(request.token_ids) for request in requests])
        return [
            [Completion([65] * (copy + 1), [-5.5] * (copy + 1), "stop") for copy in range(request.num_completions)]
            for request in requests
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(weights)

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...


def flat_if_even(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Completions of even prompts all earn the same."""
    return [float(len(text)) if number % 2 else 1.0 for text, number in zip(completions, answer, strict=True)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "build_engine", lambda *_: CountingUp())

    def make(
        rewards: Any = flat_if_even, stream: bool = False, reward_processing_classes: Any = None, **changes: Any
    ) -> GRPOTrainer:
        values: dict[str, Any] = {
            "use_cpu": True,
            "per_device_train_batch_size": 8,
            "num_generations": 2,
            "max_completion_length": 8,
            "learning_rate": 1e-3,
            "max_steps": 6,
            "logging_steps": 1,
            "save_steps": 1,
            "disable_tqdm": True,
            "vllm_logprob_gap_limit": 0,
        }
        rows: Any = datasets.Dataset.from_list([{"prompt": f"{n}=", "answer": n} for n in range(NUM_PROMPTS)])
        args = GRPOConfig(str(tmp_path / "out"), **{**values, **changes})
        return GRPOTrainer(
            tiny_model(),
            rewards,
            args,
            rows.to_iterable_dataset() if stream else rows,
            processing_class=tiny_tokenizer(),
            reward_processing_classes=reward_processing_classes,
        )

    return make


def asked(trainer: GRPOTrainer) -> list[list[str]]:
    assert isinstance(trainer.engine, CountingUp)
    return trainer.engine.asked


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dynamic_sampling_trains_groups_with_a_spread(tmp_path: Path, make: Any) -> None:
    plain = make(save_strategy="no")
    plain.train()
    (tmp_path / "out" / "metrics.jsonl").unlink()
    trainer = make(dynamic_sampling=True, max_resample_tries=8, log_reward_trace=True)
    batches: list[list[int]] = []
    finish = trainer.rollout.finish

    def watch(rated: Any, metrics: Any, **how: Any) -> Any:
        batches.append([row[PROMPT_INDEX] for row in rated.answered.rows])
        return finish(rated, metrics, **how)

    trainer.rollout.finish = watch
    trainer.train()
    steps = [record for record in read(tmp_path / "out" / "metrics.jsonl") if "step_time" in record]
    for step, (batch, record) in enumerate(zip(batches, steps, strict=True)):
        assert record["frac_reward_zero_std"] == 0
        assert all(number % 2 for number in batch)
        assert set(Counter(batch).values()) == {2}
        flat = sum(int(text.rstrip("=")) % 2 == 0 for text in asked(plain)[step])
        assert record["dynamic_sampling/frac_reward_zero_std"] == flat / 4
        assert record["dynamic_sampling/tries"] >= (flat > 0)
        assert record["dynamic_sampling/prompts"] >= flat
    assert sum(record["dynamic_sampling/tries"] for record in steps) == len(asked(trainer)) - len(steps)
    trace = read(tmp_path / "out" / "rewards.jsonl")
    for step, batch in enumerate(batches):
        at_step = [line for line in trace if line["step"] == step]
        assert {line["prompt"] for line in at_step if line["trained"]} == set(batch)
        gone = [line for line in at_step if not line["trained"]]
        assert len(gone) == steps[step]["dynamic_sampling/prompts"]
        assert all(line["prompt"] % 2 == 0 and line["rewards"] == {"flat_if_even": [1.0, 1.0]} for line in gone)
        assert all(line["rewards"] == {"flat_if_even": [1.0, 2.0]} for line in at_step if line["trained"])


def test_dynamic_sampling_resumes_with_the_same_prompts(tmp_path: Path, make: Any) -> None:
    settings = {"dynamic_sampling": True, "vllm_per_request_seeds": True}
    whole = make(**settings)
    whole.train()
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))  # in the second epoch
    count = len(asked(resumed))
    assert 0 < count < len(asked(whole))
    assert asked(resumed) == asked(whole)[-count:]


def test_the_planned_order_of_prompts_does_not_know_of_dynamic_sampling(make: Any) -> None:
    plain, dynamic = make(save_strategy="no"), make(save_strategy="no", dynamic_sampling=True)
    plain.train()
    dynamic.train()
    planned = iter(asked(dynamic))
    for batch in asked(plain):
        assert batch in planned, "every planned batch is asked, in its turn"


@pytest.mark.parametrize(("accumulation", "iterations"), [(1, 1), (2, 2)])
def test_a_stream_trains_and_resumes_as_an_unbroken_run(
    tmp_path: Path, make: Any, accumulation: int, iterations: int
) -> None:
    settings = {
        "stream": True,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": 1,
        "num_iterations": iterations,
        "max_steps": 8,
    }
    whole = make(**settings)
    whole.train()
    assert len(asked(whole)) == 8 * accumulation // iterations
    assert whole.state.global_step == 8
    passes = [prompt for batch in asked(whole)[:3] for prompt in batch]
    assert len(set(passes)) == NUM_PROMPTS, "a pass holds every prompt once"
    assert passes != [f"{number}=" for number in range(NUM_PROMPTS)], "and is shuffled"
    assert asked(whole)[3:6] != asked(whole)[:3], "another pass is shuffled otherwise"
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert asked(resumed) == asked(whole)[5 * accumulation // iterations :]
    assert resumed.state.global_step == 8


def test_a_stream_to_evaluate_on(make: Any) -> None:
    trainer = make(num_generations_eval=2)
    rows = datasets.Dataset.from_list([{"prompt": f"{n}=", "answer": n} for n in range(7)])
    figures = trainer.evaluate(rows.to_iterable_dataset())
    assert figures["eval_rewards/flat_if_even/mean"] == pytest.approx((4 * 1.0 + 3 * 1.5) / 7)
    assert sorted(prompt for batch in asked(trainer) for prompt in batch) == [f"{n}=" for n in range(7)]
    same = trainer.evaluate(rows)
    names = [name for name in figures if "reward" in name or "completions" in name]
    assert {name: same[name] for name in names} == {name: figures[name] for name in names}
    with pytest.raises(ConfigError, match=r"'answer'\. For eval_dataset it is given prompts"):
        trainer.evaluate(rows.remove_columns("answer"))


def test_workers_a_coroutine_and_a_model_in_one_run(tmp_path: Path, make: Any) -> None:
    async def slow(completions: list[str], **_: Any) -> list[float]:
        return [2.0] * len(completions)

    def own(completions: list[str], answer: list[int], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("seen step", trainer_state.global_step)
        if answer[0] == 5:
            raise KeyError("told to")
        return [float(len(text)) for text in completions]

    trainer = make(
        [own, slow, reward_model()],
        save_strategy="no",
        max_steps=3,
        reward_processing_classes=[None, None, tiny_tokenizer()],
        reward_num_workers=1,
        on_reward_error="none",
        reward_timeout_s=20,
    )
    assert trainer.reward_processing_classes[:2] == [None, None]
    trainer.train()
    trainer.close()
    steps = [record for record in read(tmp_path / "out" / "metrics.jsonl") if "step_time" in record]
    assert [record["seen step"] for record in steps] == [0.0, 1.0, 2.0]
    assert sorted(record["reward_errors/own"] for record in steps) == [0.0, 0.0, 0.25]
    assert all(record["rewards/own/mean"] == 1.5 for record in steps)
    assert all(record["rewards/slow/mean"] == 2.0 for record in steps)
    assert all(record["rewards/Qwen2ForSequenceClassification/std"] > 0 for record in steps)
