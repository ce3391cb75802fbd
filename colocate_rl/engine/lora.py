"""An adapter in an engine's LoRA slot, written there from memory: no file, no merged weights, no second base.

vLLM keeps the factors of all layers in stacked buffers, whose layout (fused projections, tensor-parallel slices) is its
own. As with weights (:mod:`colocate_rl.engine.weights`), the copies are *recorded* while vLLM itself puts an adapter
there once, and replayed at each sync: one copy to the engine's device, one multi-tensor copy into the buffers, which
captured CUDA graphs go on reading.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from colocate_rl.engine.protocol import AdapterLayer, factor_views
from colocate_rl.engine.vllm_api import ADAPTER_ID, adapter_model
from colocate_rl.engine.weights import CopyRecorder, check_consumption
from colocate_rl.errors import WeightSyncError


class AdapterSlot:
    """The one LoRA slot of an engine.

    Args:
        model: the engine's model, built with room for an adapter.
        layers: the adapter's.
        num_shards: tensor-parallel size; a shard takes only its part of each factor.

    Raises:
        WeightSyncError: when the engine has no place for some of the layers.
    """

    def __init__(self, model: Any, layers: Sequence[AdapterLayer], num_shards: int) -> None:
        manager = model.lora_manager
        manager.remove_all_adapters()
        self._staging = torch.zeros(
            sum(layer.num_values for layer in layers), dtype=manager.lora_config.lora_dtype, device=manager.device
        )
        factors = factor_views(self._staging, layers)
        named = {
            f"{layer.name}.{factor}": tensor
            for layer, pair in zip(layers, factors, strict=True)
            for factor, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }
        with torch.no_grad(), CopyRecorder(named) as recorder:
            manager.add_adapter(adapter_model(layers, factors, getattr(model, "hf_to_vllm_mapper", None)))
            manager.activate_adapter(ADAPTER_ID)
        try:
            check_consumption(recorder, named, num_shards)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{error} vLLM has no LoRA slot for these layers. Set lora_sync='merged', which needs none."
            ) from None
        self._targets = [copy.target for copy in recorder.copies]
        self._sources = [copy.source_view(named[copy.source]) for copy in recorder.copies]

    def load(self, flat: torch.Tensor) -> None:
        """Copies the factors; queued on the current streams, not waited for."""
        if flat.shape != self._staging.shape:
            raise WeightSyncError(
                f"The adapter has {flat.numel()} values, but the engine's slot was made for {self._staging.numel()}."
            )
        with torch.no_grad():
            self._staging.copy_(flat, non_blocking=True)
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)


@contextlib.contextmanager
def without_slots(model: torch.nn.Module) -> Iterator[None]:
    """Until the block ends, the model has its layers as they were before vLLM wrapped them: loaders know only those."""
    wrapped = [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "base_layer") and hasattr(module, "set_lora")
    ]
    for parent, name, module in wrapped:
        setattr(parent, name, module.base_layer)
    try:
        yield
    finally:
        for parent, name, module in wrapped:
            setattr(parent, name, module)
