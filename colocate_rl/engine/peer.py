"""Many copies from one GPU to another, queued as one piece of work.

``Tensor.copy_`` between two devices puts a barrier between both devices' streams around every single copy. For the
hundreds of tensors of a model these cost more than half as much as the copies themselves. Here one barrier stands
before all copies and one after them; between the two the driver copies as fast as the link lets it.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from colocate_rl.errors import WeightSyncError

Copy = Callable[[int, int, int], None]
"""Copies to an address, from an address, so many bytes."""


class PeerCopies:
    """Copies of tensors on one GPU into tensors on another.

    Args:
        targets: contiguous, all on one GPU.
        sources: of the targets' shapes, all on another GPU. What has another type or is not contiguous is made fit in a
            temporary, on its own GPU, each time.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._target, self._source = targets[0].device, sources[0].device
        self._plain: list[tuple[int, int, int]] = []
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if source.dtype == target.dtype and source.is_contiguous():
                self._plain.append((target.data_ptr(), source.data_ptr(), target.nbytes))
            else:
                self._others.append((target, source))

    @classmethod
    def between(cls, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> "PeerCopies | None":
        """The copies, or None where they are not all from one GPU to another one, into contiguous memory."""
        if not targets or not all(target.is_contiguous() for target in targets):
            return None
        ends = {(target.device, source.device) for target, source in zip(targets, sources, strict=True)}
        (target, source), *others = ends
        if others or target == source or {target.type, source.type} != {"cuda"}:
            return None
        return cls(targets, sources)

    def queue(self, copy: Copy) -> None:
        """Makes all copies with ``copy``, which may return before they are done, but makes one after the other.

        A temporary is given back at once: who gets its memory next writes to it on the same stream, after the copy.
        """
        for move in self._plain:
            copy(*move)
        for target, source in self._others:
            fit = source.to(target.dtype).contiguous()
            copy(target.data_ptr(), fit.data_ptr(), target.nbytes)

    def run(self) -> None:
        """Queues all copies on the current streams of both GPUs, after what is queued there; nothing is waited for.

        Raises:
            WeightSyncError: when the driver refuses a copy.
        """
        sending = torch.cuda.current_stream(self._source)
        receiving = torch.cuda.current_stream(self._target)
        with torch.cuda.device(self._source), torch.no_grad():  # the driver takes a stream for the current device's
            sending.wait_stream(receiving)
            self.queue(functools.partial(_driver_copy, _driver(), sending.cuda_stream))
            receiving.wait_stream(sending)


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver, which torch has loaded already."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuMemcpyAsync.restype = ctypes.c_int
    return driver


def _driver_copy(driver: ctypes.CDLL, stream: int, target: int, source: int, num_bytes: int) -> None:
    error = driver.cuMemcpyAsync(target, source, num_bytes, stream)
    if error:
        raise WeightSyncError(
            f"The CUDA driver refused to copy {num_bytes} bytes of the weights between two GPUs (cuMemcpyAsync gave "
            f"error {error}). The engine's weights are incomplete; start the run again."
        )
