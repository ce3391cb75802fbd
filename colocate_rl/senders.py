"""How the policy's weights reach an engine: whole, merged with the adapter, or the adapter alone."""

from collections.abc import Iterator
from typing import Protocol

import torch
from peft import PeftModel
from torch import nn

from colocate_rl.config import GRPOConfig
from colocate_rl.engine.protocol import Engine, LoraEngine
from colocate_rl.engine.spec import LORA_RANKS, LoraSpec
from colocate_rl.errors import ConfigError
from colocate_rl.training.merging import AdapterFactors, PolicyTensor, policy_tensors


class Sender(Protocol):
    """Brings one engine to the policy's current weights."""

    def send(self, engine: Engine) -> None:
        """Sends what the engine does not have yet."""
        ...

    def forget(self) -> None:
        """Says that more than what training changes may be new."""
        ...


class WholeSender:
    """Offers every tensor each time, one by one: an engine that is the policy itself takes none.

    Args:
        policy: the unwrapped policy.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._tensors: list[PolicyTensor] = []

    def send(self, engine: Engine) -> None:
        """See :class:`Sender`."""
        engine.load_weights((tensor.name, tensor.base()) for tensor in self._found())

    def forget(self) -> None:
        """See :class:`Sender`."""
        self._tensors = []

    def _found(self) -> Iterator[PolicyTensor]:
        """The policy's tensors; looking for them takes milliseconds, so it is done once."""
        if not self._tensors:
            self._tensors = policy_tensors(self._policy)
        yield from self._tensors


class LoraSender:
    """Sends the base weights once, and then only what training changes.

    Args:
        policy: the unwrapped policy with its adapter.
        dtype: the engine's.
        merged: True: each adapted weight with the adapter merged in a temporary. False: the adapter's factors, for an
            engine that has a slot for them; whole modules that are trained are sent too.
    """

    def __init__(self, policy: PeftModel, dtype: torch.dtype, *, merged: bool) -> None:
        self._policy = policy
        self._dtype = dtype
        self._merged = merged
        self._tensors: list[PolicyTensor] = []
        self._factors: AdapterFactors | None = None

    def send(self, engine: Engine) -> None:
        """See :class:`Sender`."""
        adapter = self._policy.active_adapter
        if not isinstance(engine, LoraEngine):
            engine.load_weights((tensor.name, tensor.current(adapter)) for tensor in policy_tensors(self._policy))
            return
        if not self._tensors:
            tensors = policy_tensors(self._policy)
            engine.load_weights(_base_weights(tensors))
            self._tensors = [tensor for tensor in tensors if tensor.moves]
            if not self._merged:
                self._factors = AdapterFactors(self._tensors, adapter, self._dtype)
        if any(self._merged or tensor.layer is None for tensor in self._tensors):
            engine.update_weights(self._moved(adapter))
        if self._factors is not None:
            engine.load_adapter(self._factors.layers, self._factors.pack())

    def forget(self) -> None:
        """See :class:`Sender`."""
        self._tensors = []

    def _moved(self, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, one after the other, so that one merged weight exists at a time."""
        for tensor in self._tensors:
            if self._merged or tensor.layer is None:
                yield tensor.name, tensor.current(adapter)


def _base_weights(tensors: list[PolicyTensor]) -> list[tuple[str, torch.Tensor]]:
    """All base weights; where some are quantised, as numbers that the host's memory keeps until they are sent."""
    if any(tensor.is_quantised for tensor in tensors):
        return [(tensor.name, tensor.base().cpu()) for tensor in tensors]
    return [(tensor.name, tensor.base()) for tensor in tensors]


def sender_of(policy: nn.Module, dtype: str, slot: LoraSpec | None) -> Sender:
    """The way of this policy into engines of this type that have (or have no) slot for its adapter."""
    if isinstance(policy, PeftModel):
        return LoraSender(policy, getattr(torch, dtype), merged=slot is None)
    return WholeSender(policy)


def lora_slot(args: GRPOConfig, policy: nn.Module, dtype: str) -> LoraSpec | None:
    """The room an engine needs for the policy's adapter; None where weights arrive whole or merged.

    Args:
        args: gives ``lora_sync``.
        policy: with or without adapter.
        dtype: of the engine.

    Raises:
        ConfigError: when ``lora_sync="adapter"`` cannot work.
    """
    if not isinstance(policy, PeftModel):
        return None
    if args.lora_sync != "adapter":
        return None  # a slot saves milliseconds of a sync and costs kernels in each layer of each decode step
    tensors = [tensor for tensor in policy_tensors(policy) if tensor.layer is not None]
    reason = _obstacle(args, policy, tensors, dtype)
    if reason is not None:
        raise ConfigError(f"lora_sync='adapter' is not possible: {reason}. Use lora_sync='merged'.")
    ranks = [tensor.layer.r[policy.active_adapter] for tensor in tensors]
    targets = sorted({tensor.name.split(".")[-2] for tensor in tensors})
    return LoraSpec(max(ranks), tuple(targets))


def _obstacle(args: GRPOConfig, policy: PeftModel, tensors: list[PolicyTensor], dtype: str) -> str | None:
    """Why the adapter cannot stay apart in an engine; None: it can."""
    adapter = policy.active_adapter
    if not tensors:
        return "the adapter trains whole modules only"
    embeddings = [tensor.name for tensor in tensors if adapter not in tensor.layer.lora_A]
    if embeddings:
        return f"{embeddings[0]} is an embedding"
    if any(adapter in tensor.layer.lora_magnitude_vector for tensor in tensors):
        return "DoRA changes the length of each row"
    largest = max(tensor.layer.r[adapter] for tensor in tensors)
    if largest > LORA_RANKS[-1]:
        return f"rank {largest} is more than vLLM's {LORA_RANKS[-1]}"
    if dtype == "float32" and args.device.type == "cuda":
        return "vLLM's LoRA kernels compute in 16 bits, and the engine in float32"
    return None
