"""Real GPUs. With one GPU the engine shares it with the policy; what needs two says so."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from colocate_rl.engine.spec import EngineSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.engines import checkpoint_shapes
from tests.tiny import tiny_model

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ENGINE_GPU = min(1, NUM_GPUS - 1)
needs_two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts and NUM_GPUS == 0:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def gpu_model(
    dtype: torch.dtype = torch.bfloat16, *, tied: bool = True, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A small model with a head size that GPU attention kernels take, on GPU 0."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}
    model = tiny_model(seed, scale=2.0, tied=tied, **{**shape, **changes})
    return model.to(device="cuda:0", dtype=dtype)


def gpu_spec(model: PreTrainedModel, **changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        "model_config": model.config,
        "checkpoint": checkpoint_shapes(model.config, trust_remote_code=False),
        "dtype": "bfloat16",
        "device": ENGINE_GPU,
        "seed": 1,
        "max_model_length": 512,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.2,
        "enforce_eager": True,
    }
    return EngineSpec(**{**values, **changes})


def weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture
def build() -> Iterator[Callable[..., VllmEngine]]:
    built: list[VllmEngine] = []

    def make(model: PreTrainedModel, **changes: Any) -> VllmEngine:
        built.append(VllmEngine(gpu_spec(model, **changes)))
        return built[-1]

    yield make
    for engine in built:
        engine.close()
