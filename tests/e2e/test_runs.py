"""Whole runs from one launch: training, evaluation, checkpoints and resuming."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_launch_trains_evaluates_saves_and_resumes(launcher: Launcher) -> None:
    settings = {
        "eval_dataset": "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "log_completions": True,
        "learning_rate": 1e-3,
        "vllm_per_request_seeds": True,
        "beta": 0.05,
    }
    done = launcher(2, **settings)
    assert done.status == 0, done.text[-4000:]
    metrics = read_metrics(launcher.folder / "out")
    steps = [record for record in metrics if "step_time" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # reference and policy start as one
    assert steps[-1]["kl"] > 0
    for record in steps:
        assert record["engine/0/prompts"] == record["engine/1/prompts"] == 1
        assert record["sampling/sampling_logp_difference/mean"] < 1e-3
    evaluations = [record for record in metrics if "eval_reward" in record]
    assert [record["step"] for record in evaluations] == [2, 4]
    assert all(0 <= record["eval_reward"] <= 1 and record["eval_loss"] is not None for record in evaluations)
    table = pd.read_parquet(launcher.folder / "out/completions/completions_00001.parquet")
    assert list(table.columns) == ["step", "prompt", "completion", "low_ids", "advantage"]
    assert len(table) == 8
    assert table.groupby("prompt").size().tolist() == [4, 4]
    assert "Step 4" in done.out  # the printed table

    final = load_file(launcher.folder / "out/model.safetensors")
    shutil.rmtree(launcher.folder / "out/checkpoint-3")
    shutil.rmtree(launcher.folder / "out/checkpoint-4")
    resumed = launcher(2, **settings, resume_from_checkpoint="out/checkpoint-2")
    assert resumed.status == 0, resumed.text[-4000:]
    again = [record for record in read_metrics(launcher.folder / "out")[len(metrics) :] if "step_time" in record]
    assert [record["step"] for record in again] == [3, 4]
    # The first rollout after the resume comes from the resumed weights: same seeds, same prompts, same completions.
    for old, new in zip(steps[2:], again, strict=True):
        for name in ("reward", "loss", "num_tokens", "grad_norm"):
            assert new[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5), name
    for name, tensor in load_file(launcher.folder / "out/model.safetensors").items():
        assert (tensor - final[name]).abs().max() < 1e-4, name
