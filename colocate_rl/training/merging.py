"""The policy's weights under a checkpoint's names, with the adapter merged in a temporary or apart from them.

The policy's own tensors are only read: nothing is merged into the base weights and taken out again, which would round
them a little more each time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from colocate_rl.engine.protocol import AdapterLayer, factor_views
from colocate_rl.training.adapters import causal_lm, trained_copy
from colocate_rl.training.layout import Part, checkpoint_parts

QUANTISED = ("Params4bit", "Int8Params")
"""Classes of bitsandbytes' parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTensor:
    """One tensor of the policy as a checkpoint of its base architecture has it."""

    name: str
    owner: nn.Module
    attribute: str
    layer: Any = None
    """The LoRA layer whose adapter is added to it, or None."""
    part: Part | None = None
    """Of the parameter, that it is; None: all of it."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is stored."""
        found: nn.Parameter = getattr(self.owner, self.attribute)
        return found

    @property
    def is_quantised(self) -> bool:
        """Whether the stored values are no numbers of the weight itself."""
        return type(self.parameter).__name__ in QUANTISED

    @property
    def moves(self) -> bool:
        """Whether training changes it."""
        return self.layer is not None or self.parameter.requires_grad

    def base(self) -> torch.Tensor:
        """Its values without the adapter, without gradient; a view of the stored tensor unless it is quantised."""
        stored = dequantize_module_weight(self.owner) if self.is_quantised else self.parameter
        return self._cut(stored.detach())

    def _cut(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.part is None else self.part.of(values).contiguous()

    def current(self, adapter: str) -> torch.Tensor:
        """Its values with the adapter: merged in a temporary of the wider type, else :meth:`base`."""
        if self.layer is None:
            return self.base()
        layer = self.layer
        if adapter in layer.lora_A:
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            transposed = layer.fan_in_fan_out
        else:
            a, b, transposed = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter], True
        magnitude = layer.lora_magnitude_vector[adapter].weight if adapter in layer.lora_magnitude_vector else None
        with torch.no_grad():
            whole = replace(self, part=None).base()
            return self._cut(merged_weight(whole, a, b, layer.scaling[adapter], magnitude, transposed=transposed))


def merged_weight(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    magnitude: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """W + s B A (LoRA, arXiv:2106.09685), with magnitudes m each row scaled to length m (DoRA, arXiv:2402.09353).

    Args:
        weight: W [outputs, inputs]; never written to.
        a: A [rank, inputs].
        b: B [outputs, rank].
        scaling: s.
        magnitude: m [outputs].
        transposed: W is stored as [inputs, outputs].

    Returns:
        A new tensor shaped like ``weight``, in float32 (or float64 if ``weight`` is).
    """
    kind = torch.promote_types(torch.float32, weight.dtype)
    wide = weight.t() if transposed else weight
    merged = torch.addmm(wide.to(kind), b.to(kind), a.to(kind), alpha=scaling)
    if magnitude is not None:
        merged *= (magnitude.to(kind) / merged.norm(dim=1))[:, None]
    return merged.t().contiguous() if transposed else merged


def policy_tensors(policy: nn.Module) -> list[PolicyTensor]:
    """Every tensor of the policy once, as checkpoints cut and name them; a tied head is its embedding.

    Of a module in ``modules_to_save`` it is the active adapter's copy, never the original or another adapter's.
    """
    adapter = policy.active_adapter if isinstance(policy, PeftModel) else ""
    seen: set[int] = set()
    found = []
    for tensor in _walk(causal_lm(policy), "", adapter, None):
        if id(tensor.parameter) not in seen:
            seen.add(id(tensor.parameter))
            found.append(tensor)
    parts = checkpoint_parts(causal_lm(policy), [(tensor.name, tensor.parameter.shape) for tensor in found])
    return [replace(tensor, name=part.name, part=part) for tensor in found for part in parts[tensor.name]]


def _walk(module: Any, prefix: str, adapter: str, layer: Any) -> Iterator[PolicyTensor]:
    if isinstance(module, LoraLayer):
        adapted = adapter in module.lora_A or adapter in module.lora_embedding_A
        yield from _walk(module.base_layer, prefix, adapter, module if adapted else None)
        return
    if isinstance(module, ModulesToSaveWrapper):
        yield from _walk(trained_copy(module, adapter), prefix, adapter, None)
        return
    for name, _ in module.named_parameters(recurse=False):
        yield PolicyTensor(prefix + name, module, name, layer if name == "weight" else None)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", adapter, None)


class AdapterFactors:
    """The active adapter's factors in one flat tensor, as an engine's slot takes them.

    Args:
        tensors: the policy's; those with an adapter are linear layers.
        adapter: its name.
        dtype: of the engine.
    """

    def __init__(self, tensors: list[PolicyTensor], adapter: str, dtype: torch.dtype) -> None:
        named = [(tensor.name.removesuffix(".weight"), tensor.layer) for tensor in tensors if tensor.layer is not None]
        self._a = [layer.lora_A[adapter].weight for _, layer in named]
        self._b = [layer.lora_B[adapter].weight for _, layer in named]
        self._scalings = [float(layer.scaling[adapter]) for _, layer in named]
        self.layers = tuple(
            AdapterLayer(name, a.shape[0], a.shape[1], b.shape[0])
            for (name, _), a, b in zip(named, self._a, self._b, strict=True)
        )
        self._dtype = dtype
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def pack(self) -> torch.Tensor:
        """The current factors, B times the scaling; the same memory at each call."""
        if self._flat is None or self._flat.device != self._a[0].device:
            size = sum(layer.num_values for layer in self.layers)
            self._flat = torch.empty(size, dtype=self._dtype, device=self._a[0].device)
            pairs = factor_views(self._flat, self.layers)
            self._views = [a for a, _ in pairs] + [b for _, b in pairs]
        with torch.no_grad():
            scaled = torch._foreach_mul(self._b, self._scalings)
            torch._foreach_copy_(self._views, [*self._a, *scaled])
        return self._flat
