"""Whole runs in which the policy generates for itself, and which settings go with that."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer
from colocate_rl.engine.transformers_engine import TransformersEngine
from colocate_rl.errors import ConfigError
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.unit


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def train(folder: Path, **changes: Any) -> tuple[GRPOTrainer, list[dict[str, Any]]]:
    values: dict[str, Any] = {
        "use_vllm": False,
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 11,
    }
    prompts = datasets.Dataset.from_dict({"prompt": [f"{'ab' * (n % 5)}{n}=" for n in range(8)]})
    trainer = GRPOTrainer(
        tiny_model(tied=False),
        even_ids,
        GRPOConfig(str(folder), **{**values, **changes}),
        prompts,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    return trainer, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_from_its_own_completions_and_repeats_itself(tmp_path: Path) -> None:
    trainer, first = train(tmp_path / "a")
    assert isinstance(trainer.engine, TransformersEngine)
    assert "no engine: each generates with its own policy" in str(trainer.placement)
    torch.manual_seed(99)
    _, second = train(tmp_path / "b")
    for name in ("loss", "grad_norm", "reward", "completions/mean_length", "entropy"):
        assert [log[name] for log in first[:2]] == [log[name] for log in second[:2]], name
    assert first[0]["grad_norm"] > 0
    _, other = train(tmp_path / "c", seed=12)
    assert other[0]["reward"] != first[0]["reward"]


def test_the_log_has_the_keys_of_a_run_with_engines(tmp_path: Path) -> None:
    _, logs = train(tmp_path, num_iterations=2)
    assert logs[0]["engine/0/tokens"] > 0
    assert logs[0]["engine/0/prompts"] == 2
    assert logs[0]["time/generate_s"] > 0
    assert logs[0]["sampling/sampling_logp_difference/max"] < 1e-4, "the engine is the policy"
    assert "sampling/importance_sampling_ratio/mean" not in logs[0], "there is nothing to correct, as in TRL"
    # The second step trains the same batch with a policy that has moved.
    assert logs[1]["policy_ratio/max_deviation"] > 1e-4


def test_completions_come_from_the_policy_as_it_is(tmp_path: Path) -> None:
    """A step so large that old weights would give other log-probabilities by far."""
    _, logs = train(tmp_path, learning_rate=20.0, max_steps=4)
    for log in logs[:4]:
        assert log["sampling/sampling_logp_difference/max"] < 1e-2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_vllm_gpus": 2}, "num_vllm_gpus=2"),
        ({"vllm_devices": "1"}, r"vllm_devices=\[1\]"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"vllm_dtype": "float32", "vllm_enforce_eager": True}, "vllm_dtype='float32', vllm_enforce_eager=True"),
        ({"vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl"),
        ({"overlap": "one_step"}, "overlap='one_step'"),
        ({"lora_sync": "adapter"}, "lora_sync='adapter'"),
        ({"generation_kwargs": {"bad_words": ["x"]}}, "'bad_words', which does nothing with use_vllm=False"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams'"),
        ({"generation_kwargs": {"temperature": 2.0}}, "Set temperature instead"),
        ({"use_transformers_paged": True}, "use_transformers_paged"),
        ({"use_transformers_continuous_batching": True}, "Continuous batching"),
    ],
    ids=str,
)
def test_settings_of_engines_are_refused_without_them(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(str(tmp_path), use_vllm=False, **given)


def test_who_generates_by_use_vllm_and_num_vllm_gpus(tmp_path: Path) -> None:
    def resolved(**given: Any) -> tuple[bool | None, int | None]:
        config = GRPOConfig(str(tmp_path), **given)
        return config.use_vllm, config.num_vllm_gpus

    assert resolved() == (True, 1)
    assert resolved(num_vllm_gpus=3) == (True, 3)
    assert resolved(use_vllm=True) == (True, 1)
    assert resolved(use_vllm=False) == (False, 0)
    assert resolved(use_vllm=False, num_vllm_gpus=0) == (False, 0)


def test_settings_of_generate_are_refused_with_engines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_implementation='static' belongs to"):
        GRPOConfig(str(tmp_path), cache_implementation="static")


def test_a_static_cache_samples_the_same(tmp_path: Path) -> None:
    _, plain = train(tmp_path / "a", max_steps=1)
    _, static = train(tmp_path / "b", max_steps=1, cache_implementation="static")
    assert static[0]["reward"] == plain[0]["reward"]
    assert static[0]["loss"] == pytest.approx(plain[0]["loss"], abs=1e-6)
