"""The policy's tensors as ``save_pretrained`` would write them, without being written or copied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Concatenate

from colocate_rl.engines import checkpoint_shapes
from colocate_rl.errors import ConfigError
from colocate_rl.training import layout
from colocate_rl.training.layout import Part, checkpoint_parts
from colocate_rl.training.merging import policy_tensors
from tests.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.unit

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: list[PretrainedConfig] = [
    tiny_config(tied=True),
    tiny_config(tied=False),
    GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
    Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
    Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16),
    MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
]


def values(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.base() for tensor in policy_tensors(policy)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_names_shapes_and_values_are_a_checkpoints(tmp_path: Path, config: PretrainedConfig) -> None:
    """Engines read checkpoints; transformers holds all experts of a layer in one parameter, under other names."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for policy in (model, reloaded):
        found = values(policy)
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
        stored = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
        assert all(tensor.untyped_storage().data_ptr() in stored for tensor in found.values()), "a copy was made"
    assert checkpoint_shapes(config, trust_remote_code=False) == {name: t.shape for name, t in written.items()}


def test_what_a_model_was_loaded_by_is_left_to_it(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = vars(model).get("_weight_conversions")
    policy_tensors(model)
    assert vars(model).get("_weight_conversions") is before


def test_a_part_of_a_tensor_that_is_not_contiguous() -> None:
    stored = torch.arange(12.0).view(4, 3).t()
    assert Part("all", (3, 4), (4, 1), 0, True).of(stored) is stored
    assert Part("second row", (4,), (1,), 4, False).of(stored).tolist() == stored[1].tolist()


def test_a_checkpoint_that_would_have_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return Concatenate().convert({"a": list(tensors.values())[:2]}, ["a"], ["both"])

    monkeypatch.setattr(layout, "revert_weight_conversion", joined)
    model = tiny_model()
    with pytest.raises(ConfigError, match="computes both from several parameters"):
        checkpoint_parts(model, [("a", torch.Size([2, 3])), ("b", torch.Size([2, 3]))])
