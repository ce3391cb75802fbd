"""A tiny random model and its tokenizer, made by our own code."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

EOS, PAD = "<|eos|>", "<|pad|>"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: 256 bytes, an end and a pad token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, EOS, PAD])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


CHAT_TEMPLATE = """\
{%- if tools %}tools:{% for tool in tools %}{{ tool.function.name }};{% endfor %}<|eos|>
{% endif %}
{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set body = dict(name=call.function.name, arguments=call.function.arguments) -%}
<tool_call>{{ body | tojson }}</tool_call>
{%- endfor %}<|eos|>
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
"""Every turn ends with the end token and a line break, as in Qwen's templates."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The same with a chat template that knows tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(*, tied: bool = True, layers: int = 2, vocab: int = 288, **changes: object) -> Qwen2Config:
    """Vocabulary a little larger than the tokenizer's, as in real models."""
    values: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "architectures": ["Qwen2ForCausalLM"],
    }
    return Qwen2Config(**{**values, **changes})


def tiny_model(seed: int = 0, scale: float = 4.0, **changes: object) -> PreTrainedModel:
    """Random float32 weights, large enough that the next token depends on the prompt."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(scale)
    return model


def save_tiny(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Writes model and tokenizer where ``from_pretrained`` finds them."""
    tiny_model(seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
