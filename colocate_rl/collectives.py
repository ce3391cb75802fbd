"""Talking between ranks: ragged gathers, sums, and failing together.

With :mod:`colocate_rl.isolation` the only user of ``torch.distributed``. Every function works unchanged with one
process, and every rank must call it (no collective ever stands inside ``if host``).
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from colocate_rl.errors import PeerError, mark_only_here

LET_GO_S = 0.2
"""Seconds that gloo's threads get to let go of a run's last collective; on an idle core they need microseconds."""


class Collectives:
    """The collectives of the default process group.

    Args:
        device: where tensors must be for the group's backend (the rank's GPU for NCCL, the CPU for gloo).
    """

    def __init__(self, device: torch.device) -> None:
        self._distributed = dist.is_available() and dist.is_initialized()
        backend = dist.get_backend() if self._distributed else "gloo"
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.rank = dist.get_rank() if self._distributed else 0
        self.world_size = dist.get_world_size() if self._distributed else 1

    def gather_ragged(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Gathers tensors that differ in their first dimension.

        Args:
            values: [n_r, ...] on any device; the other dimensions and the dtype agree on all ranks.

        Returns:
            One CPU tensor [n_r, ...] per rank, in rank order.
        """
        if not self._distributed:
            return [values.cpu()]
        sizes = self._all_gather(torch.tensor([values.shape[0]], dtype=torch.int64, device=self.device)).view(-1)
        counts: list[int] = sizes.tolist()
        padded = values.new_zeros((max(counts), *values.shape[1:]), device=self.device)
        padded[: values.shape[0]] = values.to(self.device)
        if max(counts) == 0:
            return [values.new_zeros((0, *values.shape[1:]), device="cpu") for _ in counts]
        gathered = self._all_gather(padded).cpu()
        return [block[:count].clone() for block, count in zip(gathered, counts, strict=True)]

    def _all_gather(self, values: torch.Tensor) -> torch.Tensor:
        out = values.new_empty((self.world_size, *values.shape))
        dist.all_gather(list(out.unbind(0)), values.contiguous())
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        """One Python object per rank, in rank order: for small records, never for token data."""
        if not self._distributed:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value)
        return out

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks, on the CPU."""
        return self._reduce(values, "sum")

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over ranks, on the CPU."""
        return self._reduce(values, "max")

    def _reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        if not self._distributed:
            return values.cpu()
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
        return total.cpu()

    @contextlib.contextmanager
    def failing_together(self, phase: str) -> Iterator[None]:
        """Makes an error on one rank end all ranks at the end of the block, instead of leaving the others waiting.

        The lowest failing rank raises its own error; every other rank raises :class:`PeerError`, which prints one line
        and no traceback, so that the cause is shown once.

        Args:
            phase: what the block does, for the message ("generating completions").
        """
        error: Exception | SystemExit | None = None
        try:
            yield
        except (Exception, SystemExit) as caught:
            error = caught
        if not self._distributed:
            if error is not None:
                raise error
            return
        failed = self._all_gather(torch.tensor([error is not None], dtype=torch.uint8, device=self.device)).view(-1)
        if not bool(failed.any()):
            return
        texts = self.gather_objects(None if error is None else type(error).__name__)
        ranks = [rank for rank, text in enumerate(texts) if text not in (None, PeerError.__name__)]
        if isinstance(error, PeerError):
            raise error  # an inner block has already agreed on the cause
        if error is not None and self.rank == ranks[0]:
            mark_only_here(error)  # a command line may show it
            raise error
        _silence_peer_errors()
        raise PeerError(
            f"rank {self.rank} stops because rank {ranks[0]} failed while {phase} ({texts[ranks[0]]}); the cause is "
            "shown by that rank."
        ) from None


def leave() -> None:
    """Takes this process out of its group, as the last thing of a run that has ended well.

    A thread of gloo's holds the tensors of the last collective for a moment after it has returned. If it lets go of
    them while the interpreter is being torn down, it waits for a lock that nobody gives any more, and the process
    aborts ("terminate called without an active exception"). A group waits for its threads as it goes, but it goes only
    with the last model that was wrapped for it, so they are given a moment too.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LET_GO_S)


def _silence_peer_errors() -> None:
    """Prints a :class:`PeerError` that nobody catches as one line; other errors go to the hook that was there."""
    previous = sys.excepthook
    if getattr(previous, "_silences_peer_errors", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, PeerError):
            sys.stderr.write(f"colocate_rl: {value}\n")
        else:
            previous(kind, value, trace)

    hook._silences_peer_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
