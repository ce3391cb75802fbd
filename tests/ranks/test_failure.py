"""A launch in which a rank is lost ends soon, with an exit code that says so, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from colocate_rl.collectives import Collectives
from tests.ranks.launch import RankError, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 60


@pytest.mark.parametrize(
    ("how", "words"),
    [("kill", "Signal 9 (SIGKILL)"), ("raise", "LookupError: raised by rank 1 outside of failing_together")],
)
def test_a_launch_ends_when_a_rank_is_lost(how: str, words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    start = time.monotonic()
    launch = subprocess.Popen(
        [*command, str(Path(__file__).with_name("crash.py")), how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launch.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(launch.pid, signal.SIGKILL)
        output, _ = launch.communicate()
        pytest.fail(f"the launch still ran after {LIMIT_S} s:\n{output}")
    ready = {int(rank): int(pid) for rank, pid in re.findall(r"ready: rank (\d) of 2, process (\d+)", output)}
    assert sorted(ready) == [0, 1], output
    assert launch.returncode != 0, output
    assert words in output
    assert time.monotonic() - start < LIMIT_S
    for pid in ready.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# The tests' own launcher


def lose(how: str) -> None:
    """Rank 1 is lost in some way while rank 0 waits for it."""
    collectives = Collectives(torch.device("cpu"))
    if collectives.rank == 1:
        if how == "raise":
            raise LookupError("only rank 1 has a problem")
        time.sleep(600)
    collectives.gather_ragged(torch.zeros(1))


def where_am_i() -> tuple[int, int, str]:
    collectives = Collectives(torch.device("cpu"))
    return collectives.rank, collectives.world_size, os.environ["RANK"]


def test_a_test_is_told_of_lost_ranks_and_gets_new_ones(tmp_path: Path) -> None:
    group = Ranks(2, tmp_path)
    try:
        for how, words in (("raise", "LookupError: only rank 1 has a problem"), ("hang", "rank 1: no answer in time")):
            assert group.run(where_am_i) == [(0, 2, "0"), (1, 2, "1")]
            pids = group.pids
            with pytest.raises(RankError, match=words):
                group.run(lose, how, timeout_s=2 if how == "hang" else 40)
            assert not group.pids
            for pid in pids:
                assert pid is not None
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
    finally:
        group.kill()


def test_ranks_leave_in_order_right_after_their_last_collective(tmp_path: Path) -> None:
    """Without leaving, about one in six aborted: a thread of gloo's still held the collective's tensors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    script = str(Path(__file__).with_name("leaving.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), "12"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=95,
    )
    assert done.stdout == "0 of 24 ended badly\n", done.stderr
