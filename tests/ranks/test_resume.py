"""Two ranks, each with its file in the checkpoint, two engines: broken off anywhere and gone on with."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colocate_rl import engines
from colocate_rl.resume import file_name
from tests.ranks.launch import Ranks
from tests.resuming import BackgroundStreamEngine, Ran, assert_same_run, run

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

CHANGES = {
    "num_vllm_gpus": 2,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "eval_strategy": "no",
}
"""Four prompts a batch, as on one rank."""


def run_on_rank(folder: str, step: int | None, changes: dict[str, Any]) -> Ran:
    torch.set_num_threads(1)
    kept = engines.build_engine
    engines.build_engine = lambda *_: BackgroundStreamEngine()  # type: ignore[assignment]
    try:
        return run(Path(folder), step, **{**CHANGES, **changes})
    finally:
        engines.build_engine = kept


def go(group: Ranks, folder: Path, step: int | None, **changes: Any) -> list[Ran]:
    return group.run(run_on_rank, str(folder), step, changes, timeout_s=120)


@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_every_step_of_a_generation_batch(ranks: Callable[[int], Ranks], tmp_path: Path, overlap: str) -> None:
    changes = {"overlap": overlap, "max_staleness": 4 if overlap == "one_step" else 1, "max_steps": 7}
    whole = go(ranks(2), tmp_path, None, **changes)
    for step in (1, 2, 3):
        assert (tmp_path / f"checkpoint-{step}" / file_name(1)).is_file()
        for found, expected in zip(go(ranks(2), tmp_path, step, **changes), whole, strict=True):
            assert_same_run(found, expected)


def test_a_rank_without_its_file_makes_all_generate_again(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    whole = go(ranks(2), tmp_path, None, max_steps=3)
    shutil.move(tmp_path / "checkpoint-1" / file_name(1), tmp_path / "elsewhere")
    found = go(ranks(2), tmp_path, 1, max_steps=3)
    for (_, weights), (_, others) in itertools.pairwise(found):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, others[name], rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_same_run(found[0], whole[0])
