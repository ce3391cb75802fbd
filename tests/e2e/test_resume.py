"""A launch broken off inside a generation batch, with real engines that sample from streams of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "step_time" in record]


def test_a_resumed_run_equals_the_unbroken_one(launcher: Launcher) -> None:
    """Four optimizer steps per generation batch, broken off after the third; the other two need a new one."""
    settings = {
        "steps_per_generation": 2,
        "num_iterations": 2,
        "beta": 0.05,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "eval_dataset": "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    done = launcher(2, **settings)
    assert done.status == 0, done.text[-4000:]
    out = launcher.folder / "out"
    steps, final = steps_of(out), load_file(out / "model.safetensors")
    start = load_file(launcher.folder / "model/model.safetensors")
    assert max(float((final[name] - start[name]).abs().max()) for name in final) > 1e-3
    resumed = launcher(2, **settings, resume_from_checkpoint="out/checkpoint-3")
    assert resumed.status == 0, resumed.text[-4000:]
    assert "is generated again" not in resumed.text
    again = steps_of(out)[len(steps) :]
    assert [record["step"] for record in again] == [4, 5, 6]
    assert "reward" in again[1], "a generation batch of its own"
    for old, new in zip(steps[3:], again, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "num_tokens"):
            assert new[name] == pytest.approx(old[name], rel=1e-6, abs=1e-6), (old["step"], name)
    assert again[1]["reward"] == steps[4]["reward"]
    for name, weight in load_file(out / "model.safetensors").items():
        assert (weight - final[name]).abs().max() <= 1e-6, name
