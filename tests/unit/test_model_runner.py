"""Which of vLLM's model runners an engine asks for."""

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from colocate_rl.engine.spec import EngineSpec, architectures_of, environment, second_runner

pytestmark = pytest.mark.unit

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def spec(config: Any = None, **changes: Any) -> EngineSpec:
    values: dict[str, Any] = {
        **{"model_config": config or Qwen2Config(), "checkpoint": {}, "dtype": "bfloat16", "device": 0, "seed": 0},
        **{"max_model_length": 512, "max_num_seqs": 1024, "gpu_memory_utilization": 0.9, "enforce_eager": False},
    }
    return EngineSpec(**{**values, **changes})


def test_a_configuration_that_was_never_saved_has_the_class_of_its_kind() -> None:
    assert architectures_of(Qwen2Config()) == ["Qwen2ForCausalLM"]
    assert architectures_of(Qwen2Config(architectures=["MyOwn"])) == ["MyOwn"]
    assert architectures_of(SimpleNamespace(architectures=None)) == []


def test_the_newer_one_is_asked_for_where_it_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    assert second_runner(spec())
    assert environment(spec())[RUNNER] == "1"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": None},
        {"model_impl": "transformers"},
        {"tokenizer": "for structured outputs"},
        {"tensor_parallel_size": 2, "port": 29500},
        {"extra": {"speculative_config": {"method": "ngram"}}},
        {"config": LlamaConfig()},
    ],
)
def test_elsewhere_vllm_decides(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    assert not second_runner(spec(**changes))
    assert RUNNER not in environment(spec(**changes))


def test_plugins_that_only_the_older_one_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [group])
    assert not second_runner(spec())


@pytest.mark.parametrize("said", ["0", "1"])
def test_what_the_environment_says_holds(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(RUNNER, said)
    assert environment(spec())[RUNNER] == said
