"""Objectives in whole runs of two ranks with real engines: a recipe, and everything that moves, over a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import REPOSITORY, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "step_time" in record]


@pytest.mark.slow
def test_a_recipe_trains(launcher: Launcher) -> None:
    """GSPO: batches used for four updates, so ratios leave 1, and their range of 4e-4 is soon left too."""
    recipe = REPOSITORY / "examples/recipes/gspo.yaml"
    done = launcher(2, config=recipe, learning_rate=1e-3, gradient_accumulation_steps=1, steps_per_generation=4)
    assert done.status == 0, done.text[-4000:]
    steps = steps_of(launcher.folder / "out")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[0]["policy_ratio/max_deviation"] == 0.0
    assert all(record["policy_ratio/max_deviation"] > 3e-4 for record in steps[1:])
    assert any(record["clip_ratio/region_mean"] > 0 for record in steps[1:])
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-3 for record in steps if "reward" in record)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_everything_that_moves(launcher: Launcher, overlap: str) -> None:
    settings = {
        "overlap": overlap,
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "beta": 0.05,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 9.0,
        "top_entropy_quantile": 0.5,
        "off_policy_mask_threshold": 0.5,
        "padding_free": True,
        "max_tokens_per_micro_batch": 30,
        "eval_dataset": "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-3,
        "vllm_per_request_seeds": True,
    }
    done = launcher(2, **settings)
    assert done.status == 0, done.text[-4000:]
    out = launcher.folder / "out"
    steps = steps_of(out)
    assert [record["entropy_coef"] for record in steps] == pytest.approx([0.015, 0.02, 0.025, 0.03])
    assert steps[0]["loss"] == pytest.approx(steps[0]["policy_loss"], abs=1e-6)
    applied = [record["policy_loss"] - record["loss"] for record in steps[1:]]
    assert all(difference > 0 for difference in applied)
    for record in steps:
        assert record["sampling/sampling_logp_difference/mean"] < (1e-3 if overlap == "none" else 0.2)
    before, after = (load_file(out / f"checkpoint-{step}/reference.safetensors") for step in (1, 2))
    policy = load_file(out / "checkpoint-2/model.safetensors")
    names = policy.keys() & after.keys()  # a tied head is its embedding, under either name
    assert len(names) == len(policy) - 1 == len(after) - 1
    for name in names:
        mixed = 0.6 * policy[name] + 0.4 * before[name]
        assert (after[name] - mixed).abs().max() < 1e-6, name
    final = load_file(out / "checkpoint-4/reference.safetensors")
    resumed = launcher(2, **settings, resume_from_checkpoint="out/checkpoint-2")
    assert resumed.status == 0, resumed.text[-4000:]
    for old, new in zip(steps[2:], steps_of(out)[4:], strict=True):
        for name in ("reward", "loss", "policy_loss", "kl", "entropy_coef", "grad_norm"):
            assert new[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5), name
    for name, weight in load_file(out / "checkpoint-4/reference.safetensors").items():
        assert (weight - final[name]).abs().max() < 1e-4, name
