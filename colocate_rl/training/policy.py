"""Loading the policy, its tokenizer and the reference model, with every check that needs no weights first."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from colocate_rl.errors import ConfigError
from colocate_rl.paths import local_or_hub, looks_like_path
from colocate_rl.training.shape import text_config


def check_model_folder(name: str) -> None:
    """Refuses a model folder that is not there or holds no model; a hub name is left to the hub.

    Raises:
        ConfigError: naming what is missing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"Model folder {name!r} has no config.json. Point --model at a folder made by save_pretrained."
            )
    elif path.exists() or looks_like_path(name):
        raise ConfigError(
            f"Model folder {name!r} does not exist. Check --model (a local folder, or a hub name owner/model)."
        )


def load_config(name: str, init_kwargs: Mapping[str, Any], *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a model, local or from the hub, before any weights are touched.

    Raises:
        ConfigError: when there is no such model.
    """
    check_model_folder(name)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            local_or_hub(name), revision=init_kwargs.get("revision"), trust_remote_code=trust_remote_code
        )
    except OSError as error:
        raise ConfigError(
            f"Model {name!r} is neither a folder here nor a model the hub could give: {str(error).splitlines()[0]}"
        ) from error
    return config


def load_tokenizer(name: str, init_kwargs: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model.

    Raises:
        ConfigError: when there is none.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            local_or_hub(name),
            revision=init_kwargs.get("revision"),
            trust_remote_code=trust_remote_code,
            padding_side="left",
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No tokenizer could be loaded from {name!r} ({str(error).splitlines()[0]}). Pass one as processing_class."
        ) from error
    return tokenizer


def load_policy(name: str, init_kwargs: Mapping[str, Any], *, trust_remote_code: bool) -> PreTrainedModel:
    """Loads a causal language model, in float32 unless ``init_kwargs`` says otherwise, on the CPU.

    One whose attention caps its scores (Gemma 2) gets the implementation that does, unless ``init_kwargs`` names one.

    Args:
        name: folder or hub name.
        init_kwargs: of ``from_pretrained``.
        trust_remote_code: let the repository's own code run.
    """
    kwargs = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **init_kwargs}
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = getattr(torch, kwargs["dtype"], None)
        if not isinstance(kwargs["dtype"], torch.dtype):
            raise ConfigError(
                f"model_init_kwargs: dtype {init_kwargs['dtype']!r} is no torch dtype such as 'bfloat16'."
            )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(local_or_hub(name), **kwargs)
    except ValueError as error:
        raise ConfigError(f"{name!r} is no causal language model: {error}") from error
    if leaves_out_softcap(model) and "attn_implementation" not in init_kwargs:
        model.set_attn_implementation("eager")
    return model


def leaves_out_softcap(model: PreTrainedModel) -> bool:
    """Whether the model computes attention without the cap on scores that it was trained with, as engines do not."""
    cap = getattr(text_config(model.config), "attn_logit_softcapping", None)
    return bool(cap) and model.config._attn_implementation == "sdpa"  # torch's function takes no cap


def make_reference(
    policy: PreTrainedModel, name: str | None, init_kwargs: Mapping[str, Any], *, trust_remote_code: bool
) -> PreTrainedModel:
    """A frozen copy of the policy as it starts: loaded again from its name, or copied when it has none."""
    if name is None:
        reference = copy.deepcopy(policy)
    else:
        reference = load_policy(name, init_kwargs, trust_remote_code=trust_remote_code)
    reference.requires_grad_(False)
    reference.eval()
    return reference


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of ``model`` to 0: dropout layers, and the numbers that attention layers keep."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a forward pass in training mode drops anything."""
    return any(True for _ in _dropouts(model))


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every module and attribute that holds a dropout probability above 0."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = name == "p" if isinstance(module, nn.Dropout) else name.endswith("dropout")
            if is_probability and isinstance(value, float) and value > 0:
                yield module, name


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The pad id, giving the tokenizer its end-of-sequence token as pad token when it has none.

    Raises:
        ConfigError: when it has neither.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has neither a pad nor an end-of-sequence token, so no completion could "
                "end. Set tokenizer.eos_token."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def set_pad_token(policy: PreTrainedModel, token_id: int) -> None:
    """Tells the model, so that what it generates or saves names the same pad token."""
    policy.config.pad_token_id = token_id
    if policy.generation_config is not None:
        policy.generation_config.pad_token_id = token_id


def end_token_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a completion: the generation configuration's and the tokenizer's, sorted."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(int(token) for token in ids if token is not None))


def context_window(config: PretrainedConfig, limit: int | None) -> int | None:
    """Tokens that prompt and completion may have together: the setting, else the model's own; None when unknown.

    Raises:
        ConfigError: when the setting is larger than the model's positions.
    """
    own = getattr(text_config(config), "max_position_embeddings", None)
    if limit is not None and own is not None and limit > own:
        raise ConfigError(
            f"vllm_max_model_length={limit} is more than the model's {own} positions (max_position_embeddings). "
            f"Lower it."
        )
    return limit if limit is not None else own


def vocab_size(config: PretrainedConfig) -> int | None:
    """Embeddings of the model; None when the configuration does not say."""
    size = getattr(text_config(config), "vocab_size", None)
    return None if size is None else int(size)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point type of the model's parameters (of the first one)."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
