"""How a checkpoint cuts and names a model's parameters: engines read checkpoints, the policy may hold them otherwise.

transformers keeps the experts of a layer in one parameter, where checkpoints and vLLM's loaders have a tensor for each,
and gives some modules other names. ``save_pretrained`` turns that back, and what it does is found out here once, on
tensors without storage, so that a sync reads plain views of the policy's own parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from colocate_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint's tensor as a view of a parameter."""

    name: str
    """In the checkpoint."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements from the start of the parameter."""
    is_all: bool
    """The parameter as it is, perhaps under another name."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of a tensor with the parameter's shape; a view of it, if that is contiguous."""
        if self.is_all:
            return parameter
        values = parameter.contiguous()
        return values.as_strided(self.size, self.stride, values.storage_offset() + self.offset)


class _NoCopies(TorchFunctionMode):
    """transformers makes parts contiguous, which would hide whose parts they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def checkpoint_parts(model: PreTrainedModel, shapes: Iterable[tuple[str, torch.Size]]) -> dict[str, tuple[Part, ...]]:
    """The checkpoint's tensors that each parameter makes.

    Args:
        model: gives its architecture; neither its weights nor the checkpoint it was loaded from matter.
        shapes: name and shape of the parameters.

    Raises:
        ConfigError: where the checkpoint's tensors would have to be computed.
    """
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()}
    loaded_by = model.__dict__.pop("_weight_conversions", None)  # depends on the names in the file it was read from
    try:
        with _NoCopies():
            turned_back = revert_weight_conversion(model, dict(stand_ins))
    finally:
        if loaded_by is not None:
            model._weight_conversions = loaded_by
    parts: dict[str, list[Part]] = {name: [] for name in stand_ins}
    for name, tensor in turned_back.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise ConfigError(
                f"A checkpoint of {type(model).__name__} computes {name} from several parameters, which has no way "
                "into the engines. Set use_vllm=False to generate without them."
            )
        size, stride, whole = tuple(tensor.shape), tensor.stride(), stand_ins[owner]
        is_all = (size, stride) == (tuple(whole.shape), whole.stride())
        parts[owner].append(Part(name, size, stride, int(tensor.storage_offset()), is_all))
    return {name: tuple(found) for name, found in parts.items()}
