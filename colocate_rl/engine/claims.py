"""A counter that processes of one machine share: a number in a file, behind a lock that dies with its holder."""

from pathlib import Path

from filelock import FileLock


class FileClaims:
    """Gives out 0, 1, 2, ... to all processes that know the file; it may be pickled.

    Args:
        path: of the file; it counts from 0 where there is none yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def next(self) -> int:
        """See :meth:`colocate_rl.engine.protocol.Claims.next`."""
        with FileLock(f"{self._path}.lock"):
            number = int(self._path.read_text()) if self._path.exists() else 0
            self._path.write_text(str(number + 1))
        return number
