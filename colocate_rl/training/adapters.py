"""LoRA adapters on the policy: what is accepted, how they get there, and the reference model that needs no copy.

Only the active adapter is trained and sent to the engines. The reference is the policy without it (the base model), or
with a frozen copy of it where training goes on from an adapter that was trained before.
"""

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from colocate_rl.config import GRPOConfig
from colocate_rl.errors import ConfigError
from colocate_rl.options import dictionary
from colocate_rl.training.shape import text_config

REFERENCE = "ref"
"""Name of the frozen copy, which is TRL's too."""
_UNSUPPORTED = (
    "target_parameters",
    "trainable_token_indices",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "arrow_config",
    "megatron_config",
)
"""Fields of ``LoraConfig`` that change more than a layer's weight by a low-rank product."""
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that take the adapter's start out of the base weights."""


def check_arguments(model: str | nn.Module, peft_config: Any, quantization_config: Any, *, args: GRPOConfig) -> None:
    """Checks what the trainer was given, before anything is loaded.

    Raises:
        TypeError: for a ``peft_config`` or ``quantization_config`` that is none.
        ConfigError: for combinations that cannot work.
    """
    if peft_config is not None:
        if not isinstance(peft_config, PeftConfig):
            raise TypeError(f"peft_config must be a peft.LoraConfig, got {type(peft_config).__name__}.")
        if isinstance(model, PeftModel):
            raise ConfigError(
                "The model has an adapter already and peft_config asks for another one. Pass the base model with "
                "peft_config, or the model with its adapter alone."
            )
        _check_config("peft_config", peft_config, args.beta)
    if isinstance(model, PeftModel):
        for name, config in model.peft_config.items():
            _check_config(f"adapter {name!r}", config, args.beta)
    if args.sync_ref_model and (peft_config is not None or isinstance(model, PeftModel)):
        raise ConfigError(
            "sync_ref_model=True needs a reference model of its own, but here the policy without its adapter is the "
            "reference, which does not move. Remove sync_ref_model, or train all weights."
        )
    if args.lora_sync != "auto" and peft_config is None and not isinstance(model, PeftModel):
        raise ConfigError(
            f"lora_sync={args.lora_sync!r} says how an adapter reaches the engines, but there is none: the whole model "
            "is trained. Pass a peft_config (--use-peft), or remove lora_sync."
        )
    if quantization_config is not None:
        _check_quantization(model, peft_config, quantization_config, args)


def _check_config(name: str, config: PeftConfig, beta: float) -> None:
    if not isinstance(config, LoraConfig):
        raise ConfigError(
            f"{name} is a {type(config).__name__}. Only LoRA (peft.LoraConfig, also with use_dora or use_rslora) can "
            "be brought into the engines."
        )
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ConfigError(f"{name} has task_type={str(config.task_type)!r}; a policy is a 'CAUSAL_LM'.")
    used = [field for field in _UNSUPPORTED if getattr(config, field, None)]
    if used:
        raise ConfigError(
            f"{name} uses {', '.join(used)}, which the engines could not be brought to compute. Adapt whole layers "
            "with target_modules or modules_to_save instead."
        )
    start = config.init_lora_weights
    if beta != 0 and isinstance(start, str) and start.startswith(_MOVES_BASE):
        raise ConfigError(
            f"{name} has init_lora_weights={start!r}, which moves a part of the base weights into the adapter, so the "
            f"model without adapter is no reference for beta={beta:g}. Set beta=0 or init_lora_weights=True."
        )


def _check_quantization(model: str | nn.Module, peft_config: Any, quantization_config: Any, args: GRPOConfig) -> None:
    if not isinstance(quantization_config, BitsAndBytesConfig):
        raise TypeError(
            f"quantization_config must be a transformers.BitsAndBytesConfig, got {type(quantization_config).__name__}."
        )
    if not isinstance(model, str):
        raise ConfigError("quantization_config is for a model given by its name; this one is loaded already.")
    if dictionary(args.model_init_kwargs).get("quantization_config") is not None:
        raise ConfigError("quantization_config is given twice, also in model_init_kwargs. Give it once.")
    if peft_config is None:
        raise ConfigError("Quantised weights cannot be trained: give a peft_config (--use-peft) beside them.")
    if args.device.type != "cuda":
        raise ConfigError("Quantised base weights (load_in_4bit, load_in_8bit) need a GPU. Remove the setting here.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "quantization_config needs bitsandbytes, which is not installed: pip install 'colocate-rl[quantization]'."
        )


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is trained rather than the model itself."""
    return isinstance(model, PeftModel)


def check_plain(model: nn.Module) -> None:
    """Refuses a model into which transformers itself put an adapter: nobody would know which part of it is trained.

    Raises:
        ConfigError: saying how to load it.
    """
    if not has_adapter(model) and getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"{type(model).__name__} was loaded together with an adapter, or got one by model.add_adapter. Load the "
            "base model, put the adapter on it with peft.PeftModel.from_pretrained(base, adapter, is_trainable=True) "
            "and pass that."
        )


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The causal language model inside, with its adapted layers, or ``model`` itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def effective(module: nn.Module) -> nn.Module:
    """The module that computes for ``module`` now: the active trained copy of one in ``modules_to_save``."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    if module.disable_adapters or not module.active_adapters:
        return _module(module.original_module)
    return trained_copy(module, module.active_adapters[0])


def trained_copy(wrapper: ModulesToSaveWrapper, adapter: str) -> nn.Module:
    """The copy that ``adapter`` trains of a whole module, else the original."""
    if adapter in wrapper.modules_to_save:
        return _module(wrapper.modules_to_save[adapter])
    return _module(wrapper.original_module)


def _module(found: Any) -> nn.Module:
    assert isinstance(found, nn.Module)
    return found


def add_adapter(model: PreTrainedModel, peft_config: LoraConfig) -> PeftModel:
    """Gives the model a new adapter and freezes the rest.

    Raises:
        ConfigError: when the model has no such layers.
    """
    try:
        policy = get_peft_model(model, peft_config)
    except ValueError as error:
        raise ConfigError(f"peft_config does not fit {type(model).__name__}: {error}") from error
    if getattr(model, "is_quantized", False):
        for name, parameter in policy.named_parameters():
            # bfloat16 as in the QLoRA paper (arXiv:2305.14314); the updates of DoRA's magnitudes are too small for it.
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return policy


def add_reference(policy: PeftModel) -> None:
    """Keeps a frozen copy of the active adapter, which is the reference of training that goes on from it.

    Raises:
        ConfigError: when the name is taken.
    """
    if REFERENCE in policy.peft_config:
        raise ConfigError(
            f"The model has an adapter named {REFERENCE!r}, the name of the reference that beta needs. Rename it."
        )
    active = policy.active_adapter
    config = copy.deepcopy(policy.peft_config[active])
    config.init_lora_weights = True  # only values to be overwritten: the base weights stay as they are
    flags = _flags(policy)
    policy.add_adapter(REFERENCE, config)
    policy.set_adapter(active)
    values = dict(policy.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            if f".{active}." in name:
                values[name.replace(f".{active}.", f".{REFERENCE}.")].copy_(value)
    for parameter in values.values():
        parameter.requires_grad_(flags.get(parameter, False))


@contextlib.contextmanager
def reference_weights(policy: PeftModel) -> Iterator[None]:
    """Until the block ends, the policy computes what the reference does; what is trained stays as it was."""
    flags = _flags(policy)  # peft decides anew what is trained whenever it switches
    active = policy.active_adapter
    try:
        if REFERENCE in policy.peft_config:
            policy.set_adapter(REFERENCE)
            yield
        else:
            with policy.disable_adapter():
                yield
    finally:
        policy.set_adapter(active)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def _flags(policy: nn.Module) -> dict[nn.Parameter, bool]:
    return {parameter: parameter.requires_grad for parameter in policy.parameters()}


def check_adapters(policy: PeftModel) -> None:
    """Refuses adapters that would be trained but not reach the engines as they are.

    Raises:
        ConfigError: naming the adapter or layer, and what to change.
    """
    active = policy.active_adapters
    if len(active) != 1:
        raise ConfigError(
            f"The model has {len(active)} active adapters ({', '.join(active)}), but one is trained and sent to the "
            "engines. Choose it with model.set_adapter(name)."
        )
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            f"No parameter of adapter {active[0]!r} is trainable. Load it with PeftModel.from_pretrained(..., "
            "is_trainable=True)."
        )
    for name in trained:
        others = [other for other in policy.peft_config if other != active[0] and f".{other}." in name]
        if others:
            raise ConfigError(
                f"{name} is trainable, but adapter {others[0]!r} is not the active one ({active[0]!r}), so it would "
                "never change. Freeze it, or make its adapter the active one."
            )
    for path, module in causal_lm(policy).named_modules():
        if isinstance(module, LoraLayer):
            _check_layer(path, module, active[0])
        elif isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise ConfigError(f"{path} is a {type(module).__name__}, which the engines cannot be brought to compute.")
    _check_embeddings(causal_lm(policy))


def _check_layer(path: str, layer: Any, adapter: str) -> None:
    if layer.merged:
        raise ConfigError(f"The adapter is merged into {path}. Call model.unmerge_adapter() before training.")
    if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
        return
    bits = type(layer).__name__ in ("Linear4bit", "Linear8bitLt")
    if not isinstance(layer, (Linear, Embedding)) and not bits:
        raise ConfigError(
            f"{path} is adapted by a {type(layer).__name__}; only linear layers and embeddings can be. Leave it out of "
            "target_modules."
        )
    variant = layer.lora_variant.get(adapter)
    if variant is not None and (adapter not in layer.lora_magnitude_vector or isinstance(layer, Embedding)):
        raise ConfigError(f"{path} uses {type(variant).__name__}, which the engines could not be brought to compute.")


def _check_embeddings(model: Any) -> None:
    """Refuses adapters of the head, and those that part a head from the embedding it is tied to."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, LoraLayer):
        raise ConfigError(
            "An adapter on lm_head is not supported: log-probabilities are computed from its weight chunk by chunk. "
            "Remove it from target_modules, or train it whole with modules_to_save=['lm_head']."
        )
    if not getattr(text_config(model.config), "tie_word_embeddings", False) or head is None:
        return
    tied = effective(head).weight is effective(embedding).weight
    if not tied or isinstance(embedding, LoraLayer):
        raise ConfigError(
            "The adapter changes only one of lm_head and the embedding, or copies of both, but this model ties them, "
            "and an engine has one tensor for the two. Remove them from target_modules and modules_to_save, or set "
            "ensure_weight_tying=True where both are named in modules_to_save."
        )
