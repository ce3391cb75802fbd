"""The folder that an engine is built from."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen3MoeConfig

from colocate_rl.engine.folder import write_model
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit


def architectures(folder: Path, config: PretrainedConfig) -> list[str] | None:
    write_model(folder, config, "float32")
    found: list[str] | None = json.loads((folder / "config.json").read_text())["architectures"]
    return found


@pytest.mark.parametrize("kind", [GPT2Config, Qwen3MoeConfig])
def test_a_model_that_was_never_saved_gets_the_class_it_would_be_saved_with(
    tmp_path: Path, kind: type[PretrainedConfig]
) -> None:
    """Its configuration names none, and vLLM then asks for a tokenizer that it is not given."""
    config = kind()
    assert config.architectures is None
    found = architectures(tmp_path, config)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 2}
    more = {"num_experts": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1} if kind is Qwen3MoeConfig else {}
    AutoModelForCausalLM.from_config(kind(**small, **more)).save_pretrained(tmp_path / "saved")
    assert found == json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"]


def test_a_class_that_is_named_is_kept(tmp_path: Path) -> None:
    assert architectures(tmp_path, tiny_config(architectures=["MineForCausalLM"])) == ["MineForCausalLM"]
