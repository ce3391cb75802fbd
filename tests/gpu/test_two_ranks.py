"""Two NCCL ranks with DistributedDataParallel, K=2 and then one engine of two shards, on each other's GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import needs_two_gpus

pytestmark = [pytest.mark.gpu, needs_two_gpus, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.two_ranks", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mode", ["K=2", "t=2"])
def test_ranks_stay_equal_and_close_to_their_engines(ranks: list[dict[str, Any]], mode: str) -> None:
    assert ranks[0][mode]["weights"] == ranks[1][mode]["weights"]
    for rank, result in enumerate(ranks):
        assert result[mode]["device"] == rank
        assert result[mode]["group works"]
        assert result[mode]["engine on"] == [1 - rank]
    logs = ranks[0][mode]["logs"]
    assert len(logs) == 20
    assert max(log["sampling/sampling_logp_difference/mean"] for log in logs) < 0.03
    assert logs[-1]["reward"] > logs[0]["reward"]
