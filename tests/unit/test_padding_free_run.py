"""Whole optimizer steps of the trainer on a scripted engine: with and without padding, in one pass or in several."""

import random
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.training import attention
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.unit

SEED = 3


class LengthyEngine:
    """Answers each prompt with completions of very different lengths, always the same ones."""

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        return [
            [_completion((*request.token_ids, copy)) for copy in range(request.num_completions)] for request in requests
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        list(weights)

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...


def _completion(key: tuple[int, ...]) -> Completion:
    draw = random.Random(str(key))
    ids = [draw.randrange(256) for _ in range(draw.choice((0, 1, 2, 5, 30)))]
    return Completion(ids, [-5.5 - draw.random() for _ in ids], "stop")


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())

    def run(**changes: Any) -> tuple[GRPOTrainer, dict[str, torch.Tensor], list[dict[str, float]]]:
        values: dict[str, Any] = {
            "use_cpu": True,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 32,
            "beta": 0.1,
            "learning_rate": 0.5,
            "optim": "sgd",
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": SEED,
            "vllm_logprob_gap_limit": 0,
            "vllm_importance_sampling_mode": "token_truncate",
        }
        prompts = datasets.Dataset.from_dict({"prompt": [f"{'ab' * (n % 7)}{n}=" for n in range(16)]})
        trainer = GRPOTrainer(
            tiny_model(tied=False),
            even_ids,
            GRPOConfig(str(tmp_path), **{**values, **changes}),
            prompts,
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        return trainer, weights, [line for line in trainer.state.log_history if "loss" in line]

    return run


OBJECTIVES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.05},
    {"loss_type": "sapo", "off_policy_mask_threshold": 0.1, "multi_objective_aggregation": "normalize_then_sum"},
    {"loss_type": "vespo", "sync_ref_model": True, "ref_model_sync_steps": 1},
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective["loss_type"])
def test_training_is_the_same_without_padding_and_in_several_passes(run: Any, objective: dict[str, Any]) -> None:
    """Two passes over each batch, of two accumulation steps each, with a reference."""
    trainer, expected, lines = run(**objective)
    assert not trainer._objective.packed
    start = dict(tiny_model(tied=False).named_parameters())
    moved = max(float((expected[name] - weight.detach()).abs().max()) for name, weight in start.items())
    assert moved > 1e-3
    for changes in ({"padding_free": True}, {"padding_free": True, "max_tokens_per_micro_batch": 48}):
        other, weights, log = run(**objective, **changes)
        assert other._objective.packed
        for model in (other.model, other.ref_model):
            assert model.config._attn_implementation == attention.NAME
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5 * moved, msg=lambda m, n=name: n + m)
        for line, same in zip(lines, log, strict=True):
            for name in ("loss", "grad_norm", "entropy", "kl", "sampling/sampling_logp_difference/mean"):
                assert same[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.timeout(400)
def test_training_is_the_same_with_compiled_layers(run: Any) -> None:
    _, expected, lines = run(max_steps=1)
    other, weights, log = run(
        max_steps=1, padding_free=True, max_tokens_per_micro_batch=48, compile_layers=True, gradient_checkpointing=True
    )
    assert other._objective.compiled
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)
    for name in ("loss", "grad_norm", "entropy", "kl"):
        assert log[0][name] == pytest.approx(lines[0][name], rel=1e-3, abs=1e-6), name
    torch._dynamo.reset()


def test_gradient_checkpointing_and_evaluation(run: Any) -> None:
    _, expected, _ = run(max_steps=1)
    trainer, weights, _ = run(
        max_steps=1, padding_free=True, max_tokens_per_micro_batch=48, gradient_checkpointing=True
    )
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
    rows = datasets.Dataset.from_dict({"prompt": ["1=", "22=", "333="]})
    assert trainer.evaluate(rows)["eval_entropy"] > 0
