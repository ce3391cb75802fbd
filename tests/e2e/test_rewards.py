"""Rewards of every kind and streamed data from one launch with two ranks and two real engines."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Launcher
from tests.tiny import tiny_tokenizer
from tests.unit.test_reward_models import reward_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TRICKY = """
import os
import time


def tricky(completion_ids, answer, **kwargs):
    if "2" in answer:
        os.kill(os.getpid(), 9)
    if "4" in answer:
        time.sleep(600)
    return [float(len(ids) % 2 and int(answer[0]) % 4) for ids in completion_ids]
"""


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def launch(launcher: Launcher, *more: str, **changes: object) -> Any:
    start = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "-m", "colocate_rl.grpo"]
    return launcher.run([*start, *launcher.flags(**changes), *more])


@pytest.mark.slow
def test_models_ready_rewards_and_workers_that_lose_calls(launcher: Launcher) -> None:
    (launcher.folder / "tricky_rewards.py").write_text(TRICKY)
    reward_model().save_pretrained(launcher.folder / "judge")
    tiny_tokenizer().save_pretrained(launcher.folder / "judge")
    done = launch(
        launcher,
        *("--reward-funcs", "tricky_rewards:tricky", "think_format_reward"),
        "get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)",
        *("--reward-model", "./judge", "--reward_weights", "0", "1", "0", "0"),
        **{
            "reward-funcs": None,
            "reward_num_workers": 1,
            "reward_timeout_s": 3,
            "on_reward_error": "none",
            "dynamic_sampling": True,
            "max_resample_tries": 2,
            "log_reward_trace": True,
            "max_steps": 10,  # 20 prompts of 40
            "shuffle_dataset": False,
        },
    )
    assert done.status == 0, done.text[-4000:]
    steps = [record for record in read(launcher.folder / "out/metrics.jsonl") if "step_time" in record]
    trace = read(launcher.folder / "out/rewards.jsonl")
    names = {"judge", "tricky", "think_format_reward", "soft_overlong_punishment_reward"}
    assert all(set(line["rewards"]) == names for line in trace)
    for step, record in enumerate(steps):
        at_step = [line for line in trace if line["step"] == step]
        kept = [line for line in at_step if line["trained"]]
        flat = sum(len(set(line["rewards"]["tricky"])) == 1 for line in kept)
        assert record["frac_reward_zero_std"] == flat / 2
        assert len(kept) == 2
        assert all(len(line["rewards"]["judge"]) == 4 for line in at_step)
        assert len(at_step) == 2 + record["dynamic_sampling/prompts"]
        assert record["engine/0/prompts"] + record["engine/1/prompts"] >= len(at_step)
    for line in trace:
        failed = line["prompt"] in (1, 2)  # answers "2" and "4"
        assert line["rewards"]["tricky"].count(None) == (4 if failed else 0)
        assert set(line["rewards"]["think_format_reward"]) == {0.0}
    assert done.text.count("its worker process ended (signal 9") >= 1
    assert any(len(set(line["rewards"]["judge"])) > 1 for line in trace)
    assert done.text.count("took longer than 3 s") >= 1
    left = [p for p in psutil.process_iter() if "colocate_rl.scoring.worker" in " ".join(_command(p))]
    assert not [p for p in left if p.cwd() == str(launcher.folder)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_streamed_file_trains_and_resumes(launcher: Launcher) -> None:
    settings: dict[str, object] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-3,
        "vllm_per_request_seeds": True,
        "log_reward_trace": True,
        "per_device_train_batch_size": 24,  # 12 prompts of 40: a pass is 3 steps
        "max_steps": 5,
    }
    done = launch(launcher, "--dataset-streaming", **settings)
    assert done.status == 0, done.text[-4000:]
    trace = read(launcher.folder / "out/rewards.jsonl")
    prompts = [[line["prompt"] for line in trace if line["step"] == step] for step in range(5)]
    assert prompts == [list(range(first, first + 12)) for first in (0, 12, 24, 0, 12)]
    whole = [record for record in read(launcher.folder / "out/metrics.jsonl") if "step_time" in record]
    os.remove(launcher.folder / "out/metrics.jsonl")
    shutil.rmtree(launcher.folder / "out/checkpoint-5")
    resumed = launch(launcher, "--dataset-streaming", **settings, resume_from_checkpoint="out/checkpoint-3")
    assert resumed.status == 0, resumed.text[-4000:]
    again = [record for record in read(launcher.folder / "out/metrics.jsonl") if "step_time" in record]
    assert [record["step"] for record in again] == [4, 5]
    for old, new in zip(whole[3:], again, strict=True):
        for name in ("reward", "num_tokens", "loss"):
            assert new[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5), name
