"""Overlapped runs from one launch: how old the data are that they learn from, and that a lost engine ends them."""

import contextlib
import json
import signal
import time

import psutil
import pytest

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def engines_of(launcher: Launcher) -> list[psutil.Process]:
    """Engine processes that work in the launch's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "colocate_rl.engine.child" in " ".join(process.cmdline()) and process.cwd() == str(launcher.folder):
                found.append(process)
    return found


def test_one_step_trains_evaluates_and_stays_one_version_behind(launcher: Launcher) -> None:
    done = launcher(
        2,
        overlap="one_step",
        max_steps=12,  # more than an epoch of 10 generation batches
        per_device_train_batch_size=8,
        eval_dataset="eval.jsonl",
        eval_strategy="steps",
        eval_steps=5,
        learning_rate=1e-3,
    )
    assert done.status == 0, done.text[-4000:]
    records = [json.loads(line) for line in (launcher.folder / "out/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step_time" in record]
    assert [record["staleness"] for record in steps] == [0] + [1] * 11
    assert steps[0]["sampling/sampling_logp_difference/mean"] < 1e-3
    assert all(record["sampling/sampling_logp_difference/mean"] > 1e-3 for record in steps[1:])
    assert len([record for record in records if "eval_reward" in record]) == 3  # steps 5, 10 and the last
    assert not engines_of(launcher)


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stream_trains_evaluates_resumes_and_stays_on_policy(launcher: Launcher, num_processes: int) -> None:
    settings: dict[str, object] = {
        "overlap": "stream",
        "num-vllm-gpus": num_processes,
        "vllm_max_num_seqs": 8,  # of 32 completions: groups finish one after the other
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4 // num_processes,
        "eval_dataset": "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-3,
        "log_completions": True,
        "num_completions_to_print": 0,
    }
    done = launcher(num_processes, max_steps=3, save_strategy="steps", save_steps=3, **settings)
    assert done.status == 0, done.text[-4000:]
    resume = {"resume_from_checkpoint": "out/checkpoint-3", "max_steps": 5}
    resumed = launcher(num_processes, **{**settings, **resume})
    assert resumed.status == 0, resumed.text[-4000:]
    records = [json.loads(line) for line in (launcher.folder / "out/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "step_time" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    assert all(record["staleness"] == 0 for record in steps)
    assert all(record["sampling/sampling_logp_difference/mean"] < 1e-3 for record in steps), "weights are current"
    assert all(sum(record[f"engine/{e}/prompts"] for e in range(num_processes)) == 8 for record in steps)
    assert all(record["grad_norm"] > 0 for record in steps)
    assert len([record for record in records if "eval_reward" in record]) >= 2
    assert not engines_of(launcher)


@pytest.mark.slow
def test_an_error_in_an_engine_that_streams_ends_the_run_with_its_traceback(launcher: Launcher) -> None:
    done = launcher(2, overlap="stream", generation_kwargs='{"logit_bias": {"99999": 1.0}}')
    assert done.status != 0
    assert "In the engine's process:" in done.text
    assert "logit_bias" in done.text
    assert "work_off" in done.text
    assert not engines_of(launcher)


def test_two_steps_per_generation_batch_are_refused_by_the_bound(launcher: Launcher) -> None:
    done = launcher(1, overlap="one_step", **{"num-vllm-gpus": 1, "num_iterations": 2})
    assert done.status != 0
    assert "max_staleness=1 refuses that" in done.text


@pytest.mark.parametrize("overlap", [pytest.param("stream", marks=pytest.mark.slow), "one_step"])
def test_a_killed_engine_ends_the_run_within_a_minute(launcher: Launcher, overlap: str) -> None:
    log = launcher.folder / "log"
    run = launcher.start(2, log, overlap=overlap, max_steps=100000)
    family = psutil.Process(run.pid).children(recursive=True)
    children = [p for p in family if "colocate_rl.engine.child" in " ".join(p.cmdline())]
    assert len(children) == 2, log.read_text()[-3000:]
    children[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    status = run.wait(60)
    assert status != 0
    assert time.monotonic() - start < 60
    assert log.read_text().count("the engine's process ended unasked (signal 9)") == 1
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
