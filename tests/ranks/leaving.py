"""Launches of two ranks on one core that end as soon as their last collective has returned, many in a row.

Python's threads take turns by request only here, so what a thread of gloo's still has to do then is done late.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: TID251 - a launch of its own

from colocate_rl.collectives import Collectives, leave


def launch(store: Path) -> list[int]:
    """Exit statuses of two ranks, forked so that torch is imported once for all."""
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            work(rank, store)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def work(rank: int, store: Path) -> None:
    """A rank's life, in which something holds the group to the end, as a wrapped model does."""
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    sys.modules[__name__].held = dist.group.WORLD  # type: ignore[attr-defined]
    collectives = Collectives(torch.device("cpu"))
    for _ in range(3):
        collectives.sum(torch.ones(3))
    sys.setswitchinterval(1000)
    collectives.gather_ragged(torch.ones(3))
    leave()
    sys.exit()


def main() -> None:
    """Says how many ranks of so many launches ended badly."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    folder, num_launches = Path(sys.argv[1]), int(sys.argv[2])
    statuses = [status for number in range(num_launches) for status in launch(folder / f"store-{number}")]
    print(f"{sum(status != 0 for status in statuses)} of {len(statuses)} ended badly", flush=True)


if __name__ == "__main__":
    main()
