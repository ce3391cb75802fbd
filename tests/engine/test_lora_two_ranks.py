"""Two ranks train one adapter; an engine of two tensor-parallel shards takes its slices of it, both ways."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]


def test_an_engine_of_two_shards_follows_the_adapter_of_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.engine.lora_two_ranks", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for way in ("merged", "adapter"):
        assert ranks[0][way]["adapter"] == ranks[1][way]["adapter"]
        logs = ranks[0][way]["logs"]
        assert len(logs) == 4
        assert logs[0]["kl"] == 0.0
        assert logs[-1]["kl"] > 1e-3  # the adapter moved far enough for a stale engine to show
        assert all(log["sampling/sampling_logp_difference/mean"] < 1e-3 for log in logs)
