"""Process groups work on every rank before, beside and after an engine that only one rank has, at every debug level.

No DistributedDataParallel here: at level DETAIL that of torch 2.13 for CPU crashes, with or without an engine.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_groups_work_around_an_engine(level: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.engine.debug_levels"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": level},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=160,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all groups worked") == 2
