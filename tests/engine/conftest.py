"""One real vLLM engine on CPU at a time, in this very process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.spec import EngineSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.engines import checkpoint_shapes

GREEDY = SamplingSpec(max_tokens=16, temperature=0.0)


def engine_spec(model: PreTrainedModel, seed: int = 1, **changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        "model_config": model.config,
        "checkpoint": checkpoint_shapes(model.config, trust_remote_code=False),
        "dtype": "float32",
        "device": None,
        "seed": seed,
        "max_model_length": 128,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "cpu_cores": "0",
    }
    return EngineSpec(**{**values, **changes})


def weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def prompts(number: int, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 250, (number, length), generator=generator).tolist()


def greedy_by_policy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """What ``transformers`` itself generates greedily."""
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=257
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def greedy_by_engine(engine: VllmEngine, requests: list[list[int]], tokens: int = 16) -> list[list[int]]:
    answers = engine.generate([Request(p, 1) for p in requests], SamplingSpec(max_tokens=tokens, temperature=0.0))
    return [list(answer[0].token_ids) for answer in answers]


def policy_logprobs(
    model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        table = (model(ids).logits.double() / temperature).log_softmax(-1)[0, len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture
def build() -> Iterator[Callable[..., VllmEngine]]:
    """Builds engines and closes them after the test."""
    built: list[VllmEngine] = []

    def make(model: PreTrainedModel, **changes: Any) -> VllmEngine:
        built.append(VllmEngine(engine_spec(model, **changes)))
        return built[-1]

    yield make
    for engine in built:
        engine.close()
