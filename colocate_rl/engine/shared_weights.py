"""The policy's tensors as another process on this machine sees them, without sending their bytes through a pipe.

On CUDA the other process maps the very memory of the policy's parameters (CUDA IPC); on CPU both processes map one file
in shared memory, into which :meth:`SharedWeights.publish` copies the current values.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class FilePart:
    """Where one tensor lies in the shared file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, slots=True)
class FileManifest:
    """How to open the shared file."""

    path: str
    size: int
    parts: tuple[FilePart, ...]

    def open(self) -> list[tuple[str, torch.Tensor]]:
        """Maps the file; the tensors show whatever was published last."""
        buffer = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        return [(part.name, _view(buffer, part)) for part in self.parts]


@dataclass(frozen=True, slots=True)
class CudaManifest:
    """How to map CUDA memory of another process."""

    handles: tuple[tuple[str, Callable[..., torch.Tensor], tuple[Any, ...]], ...]

    def open(self) -> list[tuple[str, torch.Tensor]]:
        """Maps the memory; the tensors show the policy's parameters as they are."""
        return [(name, rebuild(*arguments).detach()) for name, rebuild, arguments in self.handles]


Manifest = FileManifest | CudaManifest


class SharedWeights:
    """Shares one set of tensors with one other process.

    Args:
        weights: names and tensors; their storage must stay where it is (optimizers update in place).
    """

    def __init__(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._pointers = [tensor.data_ptr() for _, tensor in weights]
        self._path: Path | None = None
        self._targets: list[torch.Tensor] = []
        if weights[0][1].is_cuda:
            self.manifest: Manifest = CudaManifest(tuple((name, *reduce_tensor(tensor)) for name, tensor in weights))
            return
        parts, size = [], 0
        for name, tensor in weights:
            parts.append(FilePart(name, tuple(tensor.shape), tensor.dtype, size))
            size += -(-tensor.numel() * tensor.element_size() // 64) * 64  # keeps every tensor aligned
        handle, path = tempfile.mkstemp(
            prefix="colocate_rl_weights_", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        )
        os.ftruncate(handle, size)
        os.close(handle)
        self._path = Path(path)
        self.manifest = FileManifest(path, size, tuple(parts))
        self._targets = [target for _, target in self.manifest.open()]

    def still_covers(self, weights: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Whether these are the very tensors that are shared."""
        return [tensor.data_ptr() for _, tensor in weights] == self._pointers

    def publish(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Makes the current values visible to the other process."""
        for target, (_, tensor) in zip(self._targets, weights, strict=False):
            target.copy_(tensor)
        if weights[0][1].is_cuda:
            torch.cuda.synchronize(weights[0][1].device)

    def hide(self) -> None:
        """Takes the file's name away once the other process has mapped it: a killed run then leaves nothing behind."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        """Frees what sharing took."""
        self._targets = []
        self.hide()


def _view(buffer: torch.Tensor, part: FilePart) -> torch.Tensor:
    stop = part.offset + math.prod(part.shape) * part.dtype.itemsize
    return buffer[part.offset : stop].view(part.dtype).view(part.shape)
