"""Compiled decoder layers: norms, rotations and gates become a few kernels each instead of dozens.

Layers are compiled one by one (``torch.compile`` of a region), not the model: they share their code, so one compilation
serves all of them, and whatever wraps the model (DistributedDataParallel, checkpointing, our own forward pass) stays as
it is. Shapes are dynamic: each micro-batch has another number of tokens.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of ``model``: lists of modules of the classes that transformers keeps whole on a device."""
    whole = set(model._no_split_modules or ())
    return [
        layer
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for layer in module
        if type(layer).__name__ in whole
    ]


def install(model: PreTrainedModel) -> None:
    """Compiles every layer when it is first called."""
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def uninstall(model: PreTrainedModel) -> None:
    """Gives the layers back as they were."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None


def chosen(compiled: bool) -> AbstractContextManager[object]:
    """Within it compiled layers run compiled, or as if they never had been."""
    return nullcontext() if compiled else torch.compiler.set_stance("force_eager")
