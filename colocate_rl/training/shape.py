"""What a configuration says of the shape of the model that reads and writes text."""

from dataclasses import dataclass
from typing import Any


def text_config(config: Any) -> Any:
    """The part of a configuration that is about text: a model that takes more has one for each kind of input."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a decoder that its memory depends on."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    """Width of the feed-forward block."""

    @classmethod
    def of(cls, config: Any) -> "DecoderShape":
        """Reads a configuration; a field that it does not have counts as usual."""
        text = text_config(config)
        hidden = int(text.hidden_size)
        heads = int(getattr(text, "num_attention_heads", 1))
        return cls(
            num_layers=int(text.num_hidden_layers),
            hidden_size=hidden,
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_size=int(getattr(text, "head_dim", None) or hidden // heads),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        )
