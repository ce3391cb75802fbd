"""Adapters from one launch: two ranks train, engines follow, checkpoints are PEFT's, and runs go on from them."""

import json
import shutil
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

LORA: dict[str, Any] = {
    "use-peft": "true",
    "lora-r": 4,
    "lora_dropout": 0.0,
    "lora_modules_to_save": "norm",
    "learning_rate": 1e-2,
    "beta": 0.05,
    "save_strategy": "steps",
    "save_steps": 1,
    "vllm_per_request_seeds": True,
}


def steps_of(launcher: Launcher) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (launcher.folder / "out/metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "step_time" in record]


@pytest.mark.parametrize("sync", ["merged", pytest.param("adapter", marks=pytest.mark.slow)])
def test_an_adapter_is_trained_saved_and_resumed(launcher: Launcher, sync: str) -> None:
    done = launcher(2, **LORA, lora_sync=sync)
    assert done.status == 0, done.text[-4000:]
    steps = steps_of(launcher)
    assert steps[0]["kl"] == 0.0  # the policy without adapter, bit for bit what it is with a new one
    assert steps[-1]["kl"] > 1e-4
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-3 for record in steps)

    out = launcher.folder / "out"
    assert not (out / "model.safetensors").exists()
    trained = load_file(out / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if "lora_B" in name)
    assert any(name.endswith("model.norm.weight") for name in trained)
    base = AutoModelForCausalLM.from_pretrained(launcher.folder / "model", dtype=torch.float32)
    ids = torch.arange(40)[None]
    before = base(ids).logits
    assert (PeftModel.from_pretrained(base, out)(ids).logits - before).abs().max() > 1e-3

    for number in (3, 4):
        shutil.rmtree(out / f"checkpoint-{number}")
    resumed = launcher(2, **LORA, lora_sync=sync, resume_from_checkpoint="out/checkpoint-2")
    assert resumed.status == 0, resumed.text[-4000:]
    again = steps_of(launcher)[len(steps) :]
    assert [record["step"] for record in again] == [3, 4]
    for old, new in zip(steps[2:], again, strict=True):
        for name in ("reward", "loss", "kl", "grad_norm"):
            assert new[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5), name
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        assert (tensor - trained[name]).abs().max() < 1e-4, name


@pytest.mark.slow
def test_engines_in_child_processes_follow_an_adapter_while_groups_are_streamed(launcher: Launcher) -> None:
    done = launcher(2, **{**LORA, "save_strategy": "no"}, overlap="stream")
    assert done.status == 0, done.text[-4000:]
    steps = steps_of(launcher)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert steps[-1]["kl"] > 1e-4
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-3 for record in steps)


def test_flags_of_an_adapter_without_one_are_refused_at_once(launcher: Launcher) -> None:
    done = launcher(1, **{"lora-r": 8})
    assert done.status != 0
    assert "--lora-r would have no effect" in done.text
