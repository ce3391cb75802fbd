"""Launches that cannot work end within seconds, on every rank, with one message that says what to change."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# name: (changed flags on W ranks, words the message must contain)
CASES: dict[str, tuple[dict[str, object], list[str]]] = {
    "no engine": ({"num-vllm-gpus": 0}, ["num_vllm_gpus is 0", "at least 1"]),
    "more engines than ranks": ({"num-vllm-gpus": 3}, ["num_vllm_gpus=3", "--num_processes"]),
    "more shards than ranks": ({"vllm_tensor_parallel_size": 4}, ["vllm_tensor_parallel_size=4", "--num_processes"]),
    "device twice": ({"num-vllm-gpus": "W", "vllm_devices": "0,0"}, ["vllm_devices", "0"]),
    "device out of range": ({"num-vllm-gpus": 1, "vllm_devices": "999"}, ["999", "counts"]),
    "too many processes": ({"gpus": "W"}, ["Too many processes", "GPU(s) are visible", "--num_processes"]),
    "too few processes": ({"gpus": 8}, ["Too few processes", "idle", "accelerate launch --num_processes 7"]),
    "training GPU without a share": ({"gpus": 2, "vllm_devices": "0"}, ["GPU 0", "vllm_gpu_memory_utilization"]),
    "indivisible batch": ({"num_generations": 3}, ["num_generations=3", "multiple", "valid"]),
    "one completion": ({"num_generations": 1}, ["num_generations is 1", "at least 2"]),
    "unknown reward module": ({"reward-funcs": "nowhere:f"}, ["nowhere", "--reward-funcs"]),
    "unknown reward function": ({"reward-funcs": "rewards:nothing"}, ["nothing", "low_ids"]),
    "reward path form": ({"reward-funcs": "rewards.py"}, ["package.module:function"]),
    "missing column": ({"dataset": "no_prompt.jsonl"}, ["'prompt'", "question", "answer"]),
    "reward for another column": (
        {"dataset": "long.jsonl", "reward-funcs": "rewards:by_verdict"},
        ["'by_verdict'", "'verdict'", "answer"],
    ),
    "missing data set": ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "does not exist"]),
    "missing model folder": ({"model": "./nothing"}, ["./nothing", "does not exist"]),
    "folder without model": ({"model": "."}, ["config.json"]),
    "too few prompts": ({"per_device_train_batch_size": 400}, ["40 prompt(s)", "generation_batch_size"]),
    "no room for a prompt": ({"vllm_max_model_length": 8}, ["max_completion_length=8", "vllm_max_model_length=8"]),
    "prompt too long": (
        {"vllm_max_model_length": 9, "max_completion_length": 5, "dataset": "long.jsonl"},
        ["row 1", "9"],
    ),
    "window beyond the model": ({"vllm_max_model_length": 4096}, ["4096", "128"]),
    "unknown loss": ({"loss_type": "ppo"}, ["'ppo'", "dr_grpo"]),
    "unknown flag": ({"num_generatoins": 4}, ["--num_generatoins", "--num_generations"]),
    "bad json": ({"generation_kwargs": "{oops}"}, ["JSON"]),
    "server mode": ({"vllm_mode": "server"}, ["server", "num_vllm_gpus"]),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_wrong_launch_says_what_to_change(launcher: Launcher, num_ranks: int) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "123456789+1=", "answer": "123456790"}] * 8
    (launcher.folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {}
    for name, (changes, _) in CASES.items():
        changes = {"num-vllm-gpus": 1, **changes}
        changes = {flag: num_ranks if value == "W" else value for flag, value in changes.items()}
        gpus = changes.pop("gpus", None)
        cases[name] = ([] if gpus is None else ["--gpus", str(gpus)]) + launcher.flags(**changes)
    (launcher.folder / "cases.json").write_text(json.dumps(cases))
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    done = launcher.run([*start, "-m", "tests.e2e.wrong_launches", "cases.json"], {"OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.text[-3000:]
    results: list[dict[str, Any]] = [
        json.loads((launcher.folder / f"result_{rank}.json").read_text()) for rank in range(num_ranks)
    ]
    for name, (_, words) in CASES.items():
        assert [result[name]["status"] for result in results] == [1] * num_ranks, name
        messages = [result[name]["err"] for result in results if "colocate_rl: error:" in result[name]["err"]]
        assert len(messages) == 1, (name, messages)
        assert messages[0].count("colocate_rl: error:") == 1, messages[0]
        assert "Traceback" not in messages[0], messages[0]
        for word in words:
            assert word in messages[0], (name, word, messages[0])
        assert max(result[name]["seconds"] for result in results) < 30, name


def test_the_launcher_reports_failure(launcher: Launcher) -> None:
    done = launcher(2, model="./nothing")
    assert done.status != 0
    assert done.text.count("colocate_rl: error:") == 1
    assert done.seconds < 60


def test_a_model_folder_with_a_broken_tokenizer_is_named(launcher: Launcher) -> None:
    for file in Path(launcher.folder / "model").glob("tokenizer*"):
        file.unlink()
    done = launcher.run([sys.executable, "-m", "colocate_rl.grpo", *launcher.flags(**{"num-vllm-gpus": 1})])
    assert done.status == 1
    assert "tokenizer" in done.err.lower()
