"""A child process that must not outlive its rank."""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent goes (Linux), and ends it when that has happened already.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
