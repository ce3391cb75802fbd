"""Optimizer steps on an adapter: only it moves, packing and recomputing change nothing, the reference stays."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.errors import ConfigError
from colocate_rl.training.adapters import REFERENCE
from tests.lora import LINEAR, move
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.unit, pytest.mark.timeout(200)]


class LoraEngineStub(LengthyEngine):
    """Keeps copies of what it was sent, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.sent.append(("load", len(self.weights)))

    def update_weights(self, weights: Any) -> None:
        changed = {name: tensor.clone() for name, tensor in weights}
        assert changed.keys() <= self.weights.keys()
        self.weights |= changed
        self.sent.append(("update", len(changed)))

    def load_adapter(self, layers: Any, flat: torch.Tensor) -> None:
        self.sent.append(("adapter", len(layers)))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LoraEngineStub())

    def make(model: Any = None, lora: LoraConfig | None = None, **changes: Any) -> GRPOTrainer:
        values: dict[str, Any] = {
            "use_cpu": True,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 32,
            "beta": 0.1,
            "learning_rate": 0.05,
            "optim": "sgd",
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "vllm_logprob_gap_limit": 0,
            "vllm_importance_sampling_mode": "token_truncate",
        }
        prompts = datasets.Dataset.from_dict({"prompt": [f"{'ab' * (n % 7)}{n}=" for n in range(16)]})
        args = GRPOConfig(str(tmp_path / "out"), **{**values, **changes})
        return GRPOTrainer(
            model or tiny_model(),
            even_ids,
            args,
            prompts,
            processing_class=tiny_tokenizer(),
            peft_config=lora,
        )

    return make


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), **changes})


def kl(trainer: GRPOTrainer) -> list[float]:
    return [line["kl"] for line in trainer.state.log_history if "kl" in line]


def test_only_the_adapter_moves_and_only_what_moves_is_sent(make: Any) -> None:
    trainer = make(lora=lora(modules_to_save=["norm"]), lora_sync="merged")
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    assert trainer.ref_model is None
    trainer.train()
    moved = {n for n, weight in trainer.model.named_parameters() if not torch.equal(before[n], weight)}
    assert moved == {n for n, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert kl(trainer)[0] == 0.0
    assert kl(trainer)[1] > 0
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    engine = trainer.engine
    assert engine.sent == [("load", 26)] + [("update", 14 + 5)] * 3  # matrices, and every norm
    merged: PreTrainedModel = trainer.model.merge_and_unload()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(engine.weights[name], weight.detach(), rtol=1e-5, atol=1e-6)


def test_the_adapter_alone_is_sent_where_an_engine_has_a_slot(make: Any) -> None:
    trainer = make(lora=lora(), lora_sync="adapter")
    trainer.train()
    assert trainer.engine.sent == [("load", 26), ("adapter", 14), ("adapter", 14)]


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_training_is_the_same_without_padding_and_with_recomputed_activations(
    make: Any, changes: dict[str, Any]
) -> None:
    found = []
    for settings in ({}, {"padding_free": True, "max_tokens_per_micro_batch": 48, "gradient_checkpointing": True}):
        trainer = make(lora=lora(**changes), **settings)
        assert trainer._objective.packed == bool(settings)
        trainer.train()
        found.append({n: weight.detach() for n, weight in trainer.model.named_parameters() if weight.requires_grad})
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_training_goes_on_from_an_adapter_with_a_copy_of_it_as_reference(make: Any) -> None:
    policy = get_peft_model(tiny_model(), lora())
    move(policy, 1)
    start = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    trainer = make(policy)
    trainer.train()
    assert kl(trainer)[0] == 0.0
    assert kl(trainer)[1] > 0
    for name, weight in policy.named_parameters():
        if f".{REFERENCE}." in name:
            assert torch.equal(weight, start[name.replace(f".{REFERENCE}.", ".default.")]), name
            assert not weight.requires_grad
    assert any(not torch.equal(start[name], policy.get_parameter(name)) for name in start)


def test_checkpoints_are_adapters_and_training_goes_on_from_them(make: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make(lora=lora(modules_to_save=["norm"]), **saving)
    whole.train()
    folder = tmp_path / "out" / "checkpoint-1"
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
    resumed = make(lora=lora(modules_to_save=["norm"]), **saving)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 3
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), weight, rtol=1e-5, atol=1e-6)
    saved = PeftModel.from_pretrained(tiny_model(), folder)
    assert saved.peft_config["default"].r == 4


def test_a_policy_that_generates_itself_does_so_with_its_adapter(make: Any) -> None:
    policy = get_peft_model(tiny_model(), lora())
    move(policy, 1)
    trainer = make(policy, use_vllm=False, num_vllm_gpus=0)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "kl" in line]
    assert len(logs) == 2
    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-3 for line in logs)


def test_a_second_adapter_is_left_alone(make: Any) -> None:
    policy = get_peft_model(tiny_model(), lora())
    policy.add_adapter("other", lora(r=2))
    before = {n: weight.detach().clone() for n, weight in policy.named_parameters() if ".other." in n}
    make(policy, beta=0.0).train()
    for name, weight in before.items():
        assert torch.equal(policy.get_parameter(name), weight), name


def test_two_adapters_in_the_arguments_are_refused_before_anything_is_loaded(make: Any) -> None:
    with pytest.raises(ConfigError, match="has an adapter already"):
        make(get_peft_model(tiny_model(), lora()), lora=lora())
