"""Load balancing of experts: by hand, against the models' own loss, over micro-batches, and in a run."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.errors import ConfigError
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention
from colocate_rl.training.losses import LossSettings
from colocate_rl.training.objective import Objective
from colocate_rl.training.packing import PackedRows
from colocate_rl.training.routers import RouterLoss, balance_loss, router_load, router_loss
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit import reference
from tests.unit.test_packing import SHARED, SMALL, make_batch, shared_batch
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

CONFIGS: list[PretrainedConfig] = [
    Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8),
    MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
]
WEIGHT = 0.7
ROWS = ((1, 1), (2, 1), (3, 0), (20, 40), (1, 9), (4, 12))


def make_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(4.0)  # routers that have a preference
    return model


def by_hand(layers: list[reference.Array], mask: reference.Array, experts_per_token: int) -> float:
    """E x sum of f_e P_e, one token and one layer at a time."""
    num_experts = layers[0].shape[1]
    routed, probability, count = np.zeros(num_experts), np.zeros(num_experts), 0
    for logits in layers:
        for row, counted in zip(logits, mask, strict=True):
            if not counted:
                continue
            given = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            for expert in np.argsort(-given)[:experts_per_token]:
                routed[expert] += 1
            probability += given
            count += 1
    return float(num_experts * (routed / count * probability / count).sum())


def test_value_and_gradient_against_the_formula() -> None:
    random = np.random.default_rng(0)
    layers = [random.normal(0.0, 2.0, (7, 5)) for _ in range(3)]
    mask = np.array([1, 1, 0, 1, 0, 1, 1])
    logits = [torch.tensor(layer, dtype=torch.float64).requires_grad_() for layer in layers]
    load = router_load(logits, torch.tensor(mask, dtype=torch.bool), 2)
    loss = balance_loss(load, load)
    assert loss.item() == pytest.approx(by_hand(layers, mask, 2), rel=1e-6)
    loss.backward()
    for number, layer in enumerate(logits):

        def at(values: reference.Array, number: int = number) -> float:
            return by_hand([*layers[:number], values, *layers[number + 1 :]], mask, 2)

        found = layer.grad
        assert found is not None
        np.testing.assert_allclose(found.numpy(), reference.gradient(at, layers[number]), rtol=1e-4, atol=1e-6)
        assert not found[torch.tensor(mask) == 0].any()


def make_objective(**changes: Any) -> Objective:
    return Objective(
        settings=LossSettings(loss_type="grpo"),
        temperature=1.0,
        chunk=16,
        autocast=contextlib.nullcontext,
        **changes,
    )


@contextlib.contextmanager
def early() -> Iterator[Callable[[torch.Tensor], None]]:
    yield lambda loss: loss.backward()


def gradients(
    model: PreTrainedModel, objective: Objective, batch: RolloutBatch
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss, _ = objective.loss(model, model, batch, 5.0, MetricBuffer(), early)
    loss.backward()
    return loss.item(), {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_the_loss_is_the_model_s_own_and_the_same_in_every_kind_of_pass(
    config: PretrainedConfig, checkpointing: bool, shared: bool
) -> None:
    """Also where a prompt that several rows begin with passes the model once: it counts as often as there are rows."""
    model, batch = make_model(config), shared_batch(*SHARED["groups"]) if shared else make_batch(*ROWS)
    assert (PackedRows.of(batch).keys is not None) == shared
    model.train()
    plain, without = gradients(model, make_objective(), batch)
    own = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), output_router_logits=True
    ).aux_loss
    model.zero_grad()
    (WEIGHT * own).backward()
    expected = {
        name: without.get(name, torch.zeros(())) + (0 if weight.grad is None else weight.grad)
        for name, weight in model.named_parameters()
    }
    if checkpointing:
        model.gradient_checkpointing_enable()
    whole = make_objective(router=RouterLoss(WEIGHT, 2))
    attention.install(model)
    for objective in (
        whole,
        replace(whole, packed=True),
        replace(whole, max_tokens=64),
        replace(whole, packed=True, max_tokens=64),
    ):
        loss, found = gradients(model, objective, batch)
        assert loss == pytest.approx(plain + WEIGHT * own.item(), rel=1e-5)
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=3e-4 * scale, msg=lambda m, n=name: n + m)
    gate = next(name for name in expected if "gate.weight" in name)
    assert (expected[gate] - without[gate]).abs().max() > 1e-3


def test_whose_experts_are_balanced() -> None:
    qwen, mixtral = CONFIGS
    assert router_loss(qwen, None, None) == RouterLoss(0.001, 2)
    assert router_loss(mixtral, 0.25, {"use_reentrant": False}) == RouterLoss(0.25, 2)
    assert router_loss(qwen, 0.0, {"use_reentrant": True}) is None
    assert router_loss(tiny_config(), None, None) is None
    assert router_loss(tiny_config(), 0.0, None) is None
    assert router_loss(DeepseekV3Config(), None, None) is None  # balances its experts otherwise
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.1, but Qwen2Config .* nothing to weigh"):
        router_loss(tiny_config(), 0.1, None)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.1, but DeepseekV3Config"):
        router_loss(DeepseekV3Config(), 0.1, None)
    with pytest.raises(ConfigError, match=r"use_reentrant.*weight 0.001"):
        router_loss(qwen, None, {"use_reentrant": True})


def test_a_run_logs_and_lowers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())
    config = Qwen3MoeConfig(
        **{**SMALL, "eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None},
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    found = {}
    for weight in (0.0, 1.0):
        args = GRPOConfig(
            str(tmp_path / str(weight)),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=32,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            optim="sgd",
            max_steps=6,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            vllm_logprob_gap_limit=0,
            router_aux_loss_coef=weight,
        )
        prompts = datasets.Dataset.from_dict({"prompt": [f"{number}=" for number in range(9)]})
        trainer = GRPOTrainer(make_model(config), even_ids, args, prompts, processing_class=tiny_tokenizer())
        trainer.train()
        lines = (tmp_path / str(weight) / "metrics.jsonl").read_text().splitlines()
        logged = [record for record in map(json.loads, lines) if "step_time" in record]
        assert all(("aux_loss" in record) == (weight > 0) for record in logged)
        batch = make_batch(*ROWS)
        model = trainer.model.eval()
        outputs = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), output_router_logits=True
        )
        found[weight] = outputs.aux_loss.item()
        if weight:
            assert all(2.0 - 1e-6 <= record["aux_loss"] <= 8.0 for record in logged)
    assert found[1.0] < found[0.0] - 1e-3
