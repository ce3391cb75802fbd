"""The weights' way from the policy into an engine: a plan of plain copies, made once and complete, or no plan at all.

vLLM's model knows how a checkpoint's tensors map to its own (fused q/k/v and gate/up, tied heads, tensor-parallel
slices). Rather than repeat that knowledge for each architecture, the plan is *recorded*: the model's own loader runs
once on the policy's tensors while every copy into an engine parameter is noted as "this view of that policy tensor goes
to this view of that parameter". Later syncs replay the notes into the same storage, which captured CUDA graphs keep
reading.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colocate_rl.engine.peer import PeerCopies
from colocate_rl.errors import WeightSyncError

Loader = Callable[[Sequence[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a (part of a) policy tensor."""

    source: str
    """Name of the policy tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of the source view, in elements from the start of the policy tensor."""
    target: torch.Tensor
    """View that is written."""

    def source_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the policy tensor that this copy reads."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class CopyRecorder(TorchDispatchMode):
    """Notes every copy whose source is one of the given policy tensors, and everything else that is written.

    Args:
        weights: contiguous policy tensors by name; they may lie in one storage, but not overlap.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in weights.items())
        self._starts = [start for start, _, _ in spans]
        self._spans = spans
        self.copies: list[Copy] = []
        self.constants: list[torch.Tensor] = []
        """Views filled with a constant: they need no further copy."""
        self.foreign: list[torch.Tensor] = []
        """Views written from something that is no view of a policy tensor (a computed value)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes the write, then lets it happen."""
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self._note(args[0], args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and not args[0].is_meta:
            self.constants.append(args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        found = None if source.is_meta or source.numel() == 0 else self._owner(source.data_ptr())
        if found is None or source.shape != target.shape:
            self.foreign.append(target)
            return
        name, start = found
        offset = (source.data_ptr() - start) // source.element_size()
        self.copies.append(Copy(name, tuple(source.shape), tuple(source.stride()), offset, target))

    def _owner(self, address: int) -> tuple[str, int] | None:
        """The policy tensor that ``address`` lies in, and where that tensor starts."""
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0 or address >= self._spans[position][1]:
            return None
        start, _, name = self._spans[position]
        return name, start


class CopyPlan:
    """Copies that fill every parameter of an engine exactly once from the policy's tensors.

    Args:
        copies: as recorded.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = list(copies)
        self._by_source: dict[str, list[Copy]] = defaultdict(list)
        for copy in self.copies:
            self._by_source[copy.source].append(copy)
        self._targets = [copy.target for copy in self.copies]
        self._views: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._peer: PeerCopies | None = None

    @classmethod
    def record(
        cls, load: Loader, weights: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> "CopyPlan":
        """Runs the engine model's loader once and turns what it does into a plan.

        Args:
            load: the model's own ``load_weights``.
            weights: policy tensors by checkpoint name.
            parameters: the engine's parameters by name.

        Raises:
            WeightSyncError: when a parameter is not filled exactly once from policy tensors, or a policy tensor goes
                nowhere; with the names.
        """
        with torch.no_grad(), CopyRecorder(weights) as recorder:
            load(list(weights.items()))
        check_coverage(recorder, parameters)
        unused = sorted(weights.keys() - {copy.source for copy in recorder.copies})
        if unused:
            raise WeightSyncError(f"The engine took no value from these policy tensors: {', '.join(unused)}.")
        owners = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
        return cls([copy for copy in recorder.copies if copy.target.untyped_storage().data_ptr() in owners])

    def apply(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies the current values; queued on the current streams, not waited for.

        Args:
            weights: the tensors the plan was made for, with current values (storage may have moved).
        """
        pointers = [weights[copy.source].data_ptr() for copy in self.copies]
        if pointers != self._pointers:
            self._views = [copy.source_view(weights[copy.source]) for copy in self.copies]
            self._peer = PeerCopies.between(self._targets, self._views)
            self._pointers = pointers
        if self._peer is not None:
            self._peer.run()
            return
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._views, non_blocking=True)

    def apply_part(self, name: str, tensor: torch.Tensor) -> None:
        """Copies the current values of one policy tensor; queued on the current streams, not waited for.

        Raises:
            WeightSyncError: when the plan has no tensor of this name.
        """
        copies = self._by_source.get(name)
        if copies is None:
            raise WeightSyncError(f"The engine knows no tensor {name}.")
        with torch.no_grad():
            for copy in copies:
                copy.target.copy_(copy.source_view(tensor), non_blocking=True)


def check_coverage(recorder: CopyRecorder, parameters: Mapping[str, torch.Tensor]) -> None:
    """Checks that every element of every parameter was written exactly once, and only from policy tensors.

    Raises:
        WeightSyncError: naming the parameters.
    """
    owner = {tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()}
    written: dict[str, torch.Tensor] = {}
    computed = {owner.get(view.untyped_storage().data_ptr()) for view in recorder.foreign} - {None}
    if computed:
        raise WeightSyncError(
            f"These engine parameters are computed from the checkpoint, not copied: "
            f"{', '.join(sorted(map(str, computed)))}."
        )
    for view in [*(copy.target for copy in recorder.copies), *recorder.constants]:
        name = owner.get(view.untyped_storage().data_ptr())
        if name is None:
            continue
        tensor = parameters[name]
        if name not in written:
            written[name] = torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device)
        counts = written[name].as_strided(view.shape, view.stride(), view.storage_offset() - tensor.storage_offset())
        counts.add_(1)
    wrong = [name for name in parameters if name not in written or not bool((written[name] == 1).all())]
    if wrong:
        raise WeightSyncError(
            f"{len(wrong)} engine parameter(s) would not be filled exactly once by the policy's tensors: "
            f"{', '.join(sorted(wrong)[:12])}."
        )


def check_consumption(recorder: CopyRecorder, weights: Mapping[str, torch.Tensor], num_shards: int) -> None:
    """Checks that a loader which repacks weights read every policy tensor completely.

    Args:
        recorder: of one load.
        weights: the policy tensors it was given.
        num_shards: tensor-parallel size; a shard reads only its part of each tensor, whose size is the engine's affair.

    Raises:
        WeightSyncError: naming the tensors.
    """
    views = {(copy.source, copy.size, copy.stride, copy.offset) for copy in recorder.copies}  # some are read twice
    read = dict.fromkeys(weights, 0)
    for name, size, _, _ in views:
        read[name] += math.prod(size)
    least = {name: tensor.numel() if num_shards == 1 else 1 for name, tensor in weights.items()}
    wrong = [name for name in weights if read[name] < least[name]]
    if wrong:
        raise WeightSyncError(
            f"The engine did not take over these policy tensors completely: {', '.join(sorted(wrong)[:12])}."
        )


def check_names(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Compares the policy's tensors with what a checkpoint of its architecture holds.

    Raises:
        WeightSyncError: naming every tensor that is missing, unknown or of another shape.
    """
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(shape)}"
        for name, shape in sorted(expected.items())
        if name in weights and weights[name].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing[:12])}")
    if unknown:
        problems.append(f"unknown to the engine's architecture: {', '.join(unknown[:12])}")
    if shapes:
        problems.append(f"other shape: {'; '.join(shapes[:12])}")
    if problems:
        raise WeightSyncError(f"The policy's tensors do not fit the engine ({'; '.join(problems)}).")
