"""The reward trace lets a prompt be followed over the run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from colocate_rl.rewardtrace import RewardTrace

pytestmark = pytest.mark.unit


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_prompt_with_each_functions_rewards(tmp_path: Path) -> None:
    trace = RewardTrace(tmp_path / "out", ["right", "short"])
    table = torch.tensor([[1.0, 0.1], [0.0, math.nan], [2.0, -0.5], [0.5, 0.25]])
    trace.add(3, [7, 9, 7, 9], table, trained=True)
    trace.add(4, [1], torch.tensor([[1.0, 1.0]]), trained=False)
    assert lines(tmp_path / "out" / "rewards.jsonl") == [
        {"step": 3, "prompt": 7, "trained": True, "rewards": {"right": [1.0, 2.0], "short": [0.1, -0.5]}},
        {"step": 3, "prompt": 9, "trained": True, "rewards": {"right": [0.0, 0.5], "short": [None, 0.25]}},
        {"step": 4, "prompt": 1, "trained": False, "rewards": {"right": [1.0], "short": [1.0]}},
    ]
    RewardTrace(tmp_path / "out", ["right"]).add(5, [2], torch.tensor([[1.0]]), trained=True)
    assert [line["step"] for line in lines(tmp_path / "out" / "rewards.jsonl")] == [3, 3, 4, 5], "a resumed run appends"


def test_its_size_is_bounded_and_no_line_is_cut(tmp_path: Path) -> None:
    trace = RewardTrace(tmp_path, ["right"], max_bytes=1000)
    for step in range(100):
        trace.add(step, [step % 7], torch.tensor([[0.5]]), trained=True)
    files = [tmp_path / "rewards.jsonl", tmp_path / "rewards.jsonl.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in files]
    assert all(path.stat().st_size <= 1000 for path in files)
    steps = [line["step"] for path in reversed(files) for line in lines(path)]
    assert steps == list(range(steps[0], 100))
    assert len(steps) > 10
