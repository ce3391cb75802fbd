"""The folder an engine is built from: the policy's live configuration, and its tokenizer where sampling needs one."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from colocate_rl.engine.spec import architectures_of
from colocate_rl.errors import ConfigError


def write_model(folder: Path, config: Any, dtype: str) -> list[str]:
    """Writes the policy's live configuration (an embedding may have been resized) where vLLM reads it.

    Returns:
        The classes that it names.
    """
    values = config.to_dict()
    values["dtype"] = dtype
    values.pop("quantization_config", None)
    architectures = architectures_of(config)
    if architectures:
        values["architectures"] = architectures  # vLLM would take a model that names none for something else
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return architectures


def write_tokenizer(folder: Path, tokenizer: Any) -> str:
    """Writes the tokenizer where it will be read as the kind it is: beside a config.json that may decide otherwise."""
    tokenizer.save_pretrained(folder)
    if _same_tokens(tokenizer, AutoTokenizer.from_pretrained(folder)):
        return str(folder)
    own = folder / "tokenizer"
    tokenizer.save_pretrained(own)
    return str(own)


def _same_tokens(one: Any, other: Any) -> bool:
    return bool(one.get_vocab() == other.get_vocab())


def check_tokenizer(ours: Any, theirs: Any) -> None:
    """Refuses an engine whose ids mean something else.

    Raises:
        ConfigError: naming both kinds.
    """
    if not _same_tokens(ours, theirs):
        raise ConfigError(
            f"Structured outputs need the tokenizer inside the engine, but vLLM reads {type(ours).__name__} of "
            f"{len(ours)} tokens back as {type(theirs).__name__} of {len(theirs)} tokens with other ids. Use a "
            "tokenizer that AutoTokenizer loads as it is, or generate without structured outputs."
        )
