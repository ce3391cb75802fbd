"""Adapters in an engine on a GPU: what arrives, where it lies, and that captured graphs go on reading it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig

from colocate_rl import GRPOConfig, GRPOTrainer
from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.spec import LoraSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.senders import LoraSender
from colocate_rl.training.loading import load_models
from colocate_rl.training.merging import policy_tensors
from tests.gpu.conftest import gpu_model, gpu_spec
from tests.lora import LINEAR, move
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Build = Callable[..., VllmEngine]
SLOT = LoraSpec(8, LINEAR)
PROMPTS = [list(range(10 + shift, 42 + shift)) for shift in range(8)]


def gpu_policy(**changes: Any) -> PeftModel:
    values: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": list(LINEAR)}
    policy = get_peft_model(gpu_model(**changes), LoraConfig(**{**values}))
    move(policy, 1)
    return policy


def mean_gap(engine: Any, policy: Any) -> float:
    """Mean |difference| of log-probabilities of sampled tokens, in nats."""
    answers = engine.generate([Request(prompt, 1) for prompt in PROMPTS], SamplingSpec(max_tokens=24))
    gaps = []
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = list(answer.token_ids)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = policy(torch.tensor([prompt + ids], device="cuda:0")).logits[0, len(prompt) - 1 : -1]
        found = logits.float().log_softmax(-1).cpu().gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps.append((found - torch.tensor(answer.sampling_logprobs)).abs().mean())
    return float(torch.stack(gaps).mean())


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_the_engine_follows_the_adapter(build: Build, way: str, eager: bool) -> None:
    policy = gpu_policy()
    before = [tensor.base().clone() for tensor in policy_tensors(policy)]
    engine = build(gpu_model(), enforce_eager=eager, lora=SLOT if way == "adapter" else None)
    sends = LoraSender(policy, torch.bfloat16, merged=way == "merged")
    for step in range(3):
        sends.send(engine)
        assert mean_gap(engine, policy) < 0.08
        move(policy, 2 + step)
        assert mean_gap(engine, policy) > 0.2  # it was the sync that brought them together
    assert all(torch.equal(old, now.base()) for old, now in zip(before, policy_tensors(policy), strict=True))


def test_merged_weights_are_rounded_once(build: Build) -> None:
    policy = gpu_policy(dtype=torch.float32)
    engine = build(gpu_model())
    sends = LoraSender(policy, torch.bfloat16, merged=True)
    for step in range(2):
        sends.send(engine)
        found = dict(engine._model.named_parameters())
        for number in range(2):
            layer: Any = policy.get_base_model().model.layers[number].mlp
            rows = []
            for part in (layer.gate_proj, layer.up_proj):
                a, b = part.lora_A["default"].weight.double(), part.lora_B["default"].weight.double()
                rows.append(part.base_layer.weight.double() + 2.0 * b @ a)
            exact = torch.cat(rows).to(engine._device)
            name = f"model.layers.{number}.mlp.gate_up_proj.weight"
            assert ((found[name].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
        move(policy, 2 + step)


def test_the_slot_holds_the_factors_bit_for_bit_in_the_same_storage(build: Build) -> None:
    policy = gpu_policy()
    engine = build(gpu_model(), lora=SLOT)
    sends = LoraSender(policy, torch.bfloat16, merged=False)
    sends.send(engine)
    layer = engine._model.model.layers[1].mlp.down_proj
    addresses = (layer.lora_a_stacked[0].data_ptr(), layer.lora_b_stacked[0].data_ptr())
    for step in range(3):
        move(policy, 2 + step)
        sends.send(engine)
        own: Any = policy.get_base_model().model.layers[1].mlp.down_proj
        a = own.lora_A["default"].weight.to(torch.bfloat16).to(engine._device)
        b = (own.lora_B["default"].weight * 2.0).to(torch.bfloat16).to(engine._device)
        assert torch.equal(layer.lora_a_stacked[0][0, 0, :8], a)
        assert torch.equal(layer.lora_b_stacked[0][0, 0, :, :8], b)
        assert (layer.lora_a_stacked[0].data_ptr(), layer.lora_b_stacked[0].data_ptr()) == addresses


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_an_engine_in_a_child_process_follows_too(way: str) -> None:
    policy = gpu_policy()
    engine = BackgroundEngine(gpu_spec(gpu_model(), lora=SLOT if way == "adapter" else None))
    try:
        sends = LoraSender(policy, torch.bfloat16, merged=way == "merged")
        for step in range(3):
            sends.send(engine)
            assert mean_gap(engine, policy) < 0.08
            move(policy, 2 + step)
    finally:
        engine.close()


def run_config(folder: Path, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "beta": 0.05,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "vllm_devices": "0",
        "vllm_gpu_memory_utilization": 0.2,
        "vllm_enforce_eager": True,
        "vllm_max_model_length": 256,
    }
    return GRPOConfig(str(folder / "out"), **{**values, **changes})


def quantised(bits: int) -> BitsAndBytesConfig | None:
    if bits == 4:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_type="nf4")
    return BitsAndBytesConfig(load_in_8bit=True) if bits == 8 else None


needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=needs_bitsandbytes)])
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_a_run_trains_an_adapter_that_its_engine_follows(tmp_path: Path, way: str, bits: int) -> None:
    gpu_model().cpu().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        lambda completion_ids, **_: [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids],
        run_config(tmp_path, lora_sync=way),
        datasets.Dataset.from_dict({"prompt": [f"{number}+{number}=" for number in range(24)]}),
        quantization_config=quantised(bits),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEAR)),
    )
    trainer.train()
    trainer.close()
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    assert logs[0]["kl"] < 1e-4  # no more than the rounding of two passes in bfloat16
    assert logs[-1]["kl"] > 1e-3
    assert all(log["sampling/sampling_logp_difference/mean"] < 0.1 for log in logs)


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_quantised_base_weights_reach_the_engine_as_numbers(build: Build, tmp_path: Path, way: str, bits: int) -> None:
    gpu_model().cpu().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    args = run_config(tmp_path)
    loaded, _ = load_models(
        str(tmp_path / "model"), args, LoraConfig(r=8, lora_alpha=16, target_modules=list(LINEAR)), quantised(bits)
    )
    policy: Any = loaded
    assert any(tensor.is_quantised for tensor in policy_tensors(policy))
    assert {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad} == {torch.bfloat16}
    engine = build(gpu_model(), lora=SLOT if way == "adapter" else None)
    sends = LoraSender(policy, torch.bfloat16, merged=way == "merged")
    for step in range(2):
        move(policy, 1 + step)
        sends.send(engine)
        assert mean_gap(engine, policy) < (0.08 if bits == 4 else 0.2)  # 8 bits also round activations
