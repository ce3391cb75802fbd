"""TRL's flags of adapters and quantised weights make the configurations that TRL makes of them."""

import argparse

import pytest
import torch

from colocate_rl import grpo
from colocate_rl.errors import ConfigError
from colocate_rl.peft_flags import LORA, check_flags, lora_config, quantization_config

pytestmark = pytest.mark.unit


def parse(*words: str) -> argparse.Namespace:
    given, rest = grpo.build_parser().parse_known_args(grpo.normalise_flags(words))
    assert not rest
    return given


def test_nothing_asked_nothing_made() -> None:
    given = parse()
    check_flags(given)
    assert lora_config(given) is None
    assert quantization_config(given) is None


def test_defaults_are_trls() -> None:
    config = lora_config(parse("--use_peft"))
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (16, 32, 0.05, "none")
    assert (config.task_type, config.target_modules, config.modules_to_save) == ("CAUSAL_LM", None, None)
    assert not config.use_dora
    assert not config.use_rslora


def test_every_flag_arrives() -> None:
    words = (
        "--use-peft true --lora-r 8 --lora_alpha 4 --lora_dropout 0.1 --lora_target_modules q_proj v_proj "
        "--lora_modules_to_save lm_head --use_rslora --use-dora True --load_in_4bit --bnb_4bit_quant_type fp4 "
        "--use_bnb_nested_quant --bnb_4bit_quant_storage uint8 --dtype float16 --lora_task_type CAUSAL_LM"
    )
    given = parse(*words.split())
    assert all(getattr(given, name) is not None for name in LORA if name != "load_in_8bit")
    check_flags(given)
    config = lora_config(given)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (8, 4, 0.1)
    assert (config.target_modules, config.modules_to_save) == ({"q_proj", "v_proj"}, ["lm_head"])
    assert config.use_dora
    assert config.use_rslora
    bits = quantization_config(given)
    assert bits.load_in_4bit
    assert (bits.bnb_4bit_quant_type, bits.bnb_4bit_use_double_quant) == ("fp4", True)
    assert (bits.bnb_4bit_compute_dtype, bits.bnb_4bit_quant_storage) == (torch.float16, torch.uint8)


def test_one_target_may_be_a_pattern() -> None:
    assert lora_config(parse("--use_peft", "--lora_target_modules", "all-linear")).target_modules == "all-linear"


def test_eight_bits() -> None:
    given = parse("--use_peft", "--load_in_8bit")
    check_flags(given)
    assert quantization_config(given).load_in_8bit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-r 8 --use-dora", r"--lora-r, --use-dora would have no effect"),
        ("--load_in_4bit", "--load-in-4bit would have no effect"),
        ("--lora-dropout 0", "--lora-dropout would have no effect"),
        ("--use_peft --load_in_4bit --load_in_8bit", "exclude each other"),
    ],
)
def test_flags_that_contradict(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_flags(parse(*words.split()))


def test_flags_set_to_false_ask_for_nothing() -> None:
    check_flags(parse("--use_peft", "false", "--load_in_4bit", "false"))
    assert lora_config(parse("--use_peft", "no")) is None
