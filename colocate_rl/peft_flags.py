"""Command-line flags of the adapter and of quantised base weights, under TRL's names."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colocate_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag; it stands at None until it is given, so that one without effect can be refused."""

    default: Any
    text: str
    arguments: Mapping[str, Any]


def _boolean(word: str) -> bool:
    if word.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() in ("true", "1", "yes")


_SWITCH: Mapping[str, Any] = {"nargs": "?", "const": True, "type": _boolean, "metavar": "BOOL"}

LORA: Mapping[str, Flag] = {
    "lora_r": Flag(16, "Rank of the adapter.", {"type": int, "metavar": "R"}),
    "lora_alpha": Flag(32, "The adapter is scaled by alpha / r.", {"type": int, "metavar": "ALPHA"}),
    "lora_dropout": Flag(0.05, "Dropout in front of the adapter.", {"type": float, "metavar": "P"}),
    "lora_target_modules": Flag(
        None, "Adapted layers by name, or 'all-linear'. None: peft's own choice.", {"nargs": "+", "metavar": "NAME"}
    ),
    "lora_modules_to_save": Flag(None, "Modules trained as a whole beside it.", {"nargs": "+", "metavar": "NAME"}),
    "lora_task_type": Flag("CAUSAL_LM", "Kept for TRL scripts; a policy is a CAUSAL_LM.", {"metavar": "TYPE"}),
    "use_rslora": Flag(False, "Scale by alpha / sqrt(r) instead.", _SWITCH),
    "use_dora": Flag(False, "Train the length of each weight row apart (DoRA).", _SWITCH),
    "load_in_8bit": Flag(False, "Quantise the base weights to 8 bits (bitsandbytes, GPU).", _SWITCH),
    "load_in_4bit": Flag(False, "Quantise the base weights to 4 bits (bitsandbytes, GPU).", _SWITCH),
    "bnb_4bit_quant_type": Flag("nf4", "Type of the 4 bits.", {"choices": ("fp4", "nf4")}),
    "use_bnb_nested_quant": Flag(False, "Quantise the quantisation constants too.", _SWITCH),
    "bnb_4bit_quant_storage": Flag(None, "Number type that 4-bit values are stored as.", {"metavar": "TYPE"}),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--use_peft`` and the flags it gives a meaning to."""
    group = parser.add_argument_group("Adapter (LoRA)")
    group.add_argument("--use_peft", default=False, help="Train a LoRA adapter (default: False).", **_SWITCH)
    for name, flag in LORA.items():
        group.add_argument(f"--{name}", help=f"{flag.text} (default: {flag.default})", **flag.arguments)


def check_flags(given: argparse.Namespace) -> None:
    """Refuses flags that would have no effect, or that exclude each other.

    Raises:
        ConfigError: naming them.
    """
    # By identity: 0 equals False, and is a value that somebody gave.
    used = [name for name, value in vars(given).items() if name in LORA and value is not None and value is not False]
    if used and not given.use_peft:
        flags = ", ".join("--" + name.replace("_", "-") for name in used)
        raise ConfigError(f"{flags} would have no effect: the whole model is trained. Add --use-peft or remove it.")
    if given.load_in_4bit and given.load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other. Choose one.")


def lora_config(given: argparse.Namespace) -> Any:
    """The ``LoraConfig`` that the flags describe, or None without ``--use_peft``."""
    if not given.use_peft:
        return None
    from peft import LoraConfig

    value = _values(given)
    targets = value["lora_target_modules"]
    return LoraConfig(
        task_type=value["lora_task_type"],
        r=value["lora_r"],
        lora_alpha=value["lora_alpha"],
        lora_dropout=value["lora_dropout"],
        target_modules=targets[0] if targets is not None and len(targets) == 1 else targets,
        modules_to_save=value["lora_modules_to_save"],
        use_rslora=value["use_rslora"],
        use_dora=value["use_dora"],
        bias="none",
    )


def quantization_config(given: argparse.Namespace) -> Any:
    """The ``BitsAndBytesConfig`` that the flags describe, or None; 4-bit layers compute in ``--dtype`` or bfloat16."""
    value = _values(given)
    if not (value["load_in_4bit"] or value["load_in_8bit"]):
        return None
    from transformers import BitsAndBytesConfig

    if value["load_in_8bit"]:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=given.dtype or "bfloat16",
        bnb_4bit_quant_type=value["bnb_4bit_quant_type"],
        bnb_4bit_use_double_quant=value["use_bnb_nested_quant"],
        bnb_4bit_quant_storage=value["bnb_4bit_quant_storage"],
    )


def _values(given: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(given, name) for name in LORA}
    return {name: LORA[name].default if value is None else value for name, value in found.items()}
