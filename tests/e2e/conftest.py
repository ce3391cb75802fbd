"""Real launches in an empty working directory, as a user makes them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny import save_tiny

REPOSITORY = Path(__file__).parents[2]

REWARDS = """
import os

RANK = int(os.environ.get("RANK", 0))


def low_ids(completion_ids, answer, **kwargs):
    assert len(answer) == len(completion_ids)
    return [sum(token < 128 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def fails_on_rank_1(completions, **kwargs):
    if RANK == 1:
        raise KeyError("the reward's own mistake")
    return [0.0] * len(completions)


def by_verdict(completions, verdict, **kwargs):
    return [0.0] * len(completions)


def too_few(completions, **kwargs):
    return [0.0]


if os.environ.get("BREAK_ENGINE_ON_RANK") == str(RANK):
    from colocate_rl.engine.vllm_engine import VllmEngine

    def broken(self, work, sampling, deliver):
        raise OSError("the engine's own mistake")

    VllmEngine.work_off = broken
"""


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process in another folder; a vLLM that ``PYTHONPATH`` puts before the installed one stays there."""
    paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **(changes or {})}


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.err


class Launcher:
    """Runs ``accelerate launch --num_processes N -m colocate_rl.grpo`` in a folder with a model, data and rewards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_tiny(folder / "model")
        (folder / "rewards.py").write_text(REWARDS)
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
        (folder / "no_prompt.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')

    def flags(self, **changes: object) -> list[str]:
        values: dict[str, object] = {
            "model": "./model",
            "dataset": "train.jsonl",
            "reward-funcs": "rewards:low_ids",
            "num-vllm-gpus": 2,
            "output_dir": "out",
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        values |= changes
        return [word for flag, value in values.items() if value is not None for word in (f"--{flag}", str(value))]

    def __call__(self, num_processes: int, env: dict[str, str] | None = None, **changes: object) -> Outcome:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
        return self.run([*launch, "-m", "colocate_rl.grpo", *self.flags(**changes)], env)

    def start(self, num_processes: int, log: Path, **changes: object) -> "subprocess.Popen[bytes]":
        """The same launch, not waited for; it returns once steps are logged, or the launch has failed."""
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
        with log.open("w") as out:
            run = subprocess.Popen(
                [*launch, "-m", "colocate_rl.grpo", *self.flags(**changes)],
                cwd=self.folder,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 150
        while not (self.folder / "out/metrics.jsonl").exists() and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.5)
        return run

    def run(self, command: list[str], env: dict[str, str] | None = None, timeout: float = 240) -> Outcome:
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)
