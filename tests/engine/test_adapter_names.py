"""An adapter's layers reach vLLM's LoRA manager apart, whichever of them the model's loader fuses.

No model and no compiled part of vLLM, so it runs with any version that can be imported.
"""

import importlib

import pytest
import torch

from colocate_rl.engine.protocol import AdapterLayer, factor_views
from colocate_rl.engine.vllm_api import adapter_model

pytestmark = pytest.mark.engine

NAMES = [
    f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_layers_keep_their_names(kind: str) -> None:
    module = importlib.import_module(f"vllm.model_executor.models.{kind.removesuffix('ForCausalLM').lower()}")
    layers = [AdapterLayer(name, 4, 8, 6) for name in NAMES]
    factors = factor_views(torch.arange(sum(layer.num_values for layer in layers)).float(), layers)
    model = adapter_model(layers, factors, getattr(getattr(module, kind), "hf_to_vllm_mapper", None))
    assert list(model.loras) == NAMES
    for name, (a, b) in zip(NAMES, factors, strict=True):
        assert model.loras[name].lora_a is a
        assert model.loras[name].lora_b is b
