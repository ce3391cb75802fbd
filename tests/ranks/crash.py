"""A script for torchrun in which rank 1 of 2 is lost while rank 0 waits for it in a gather."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist  # noqa: TID251 - a launch of its own

from colocate_rl.collectives import Collectives


def main(how: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    collectives = Collectives(torch.device("cpu"))
    with collectives.failing_together("starting"):
        total = collectives.sum(torch.ones(1)).item()
    print(f"ready: rank {collectives.rank} of {total:.0f}, process {os.getpid()}", flush=True)
    if collectives.rank == 1:
        time.sleep(0.5)  # rank 0 is in its gather by now
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("raised by rank 1 outside of failing_together")
    collectives.gather_ragged(torch.zeros(3))


if __name__ == "__main__":
    main(sys.argv[1])
