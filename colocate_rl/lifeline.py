"""Processes that must not outlive what started them: a child its rank, a rank its launcher."""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
_PARENT_VARIABLE = "COLOCATE_RL_PARENT"


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent goes (Linux), and ends it when that has happened already.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def child_environment() -> dict[str, str]:
    """Of a fresh interpreter that finds the modules this one finds, and calls :func:`follow_rank` first."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, _PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": paths}


def follow_rank() -> None:
    """Makes a child of a rank end with it, and leave it to the rank what an interrupt means."""
    die_with_parent(int(os.environ.pop(_PARENT_VARIABLE)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_launcher() -> None:
    """Ends this rank when the launcher that watches over it is killed: nobody else would, and its GPU would stay taken.

    Does nothing in a process that no launcher of torch has started.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
