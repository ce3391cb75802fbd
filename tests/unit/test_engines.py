"""From the configuration to how an engine is built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocate_rl import GRPOConfig
from colocate_rl.engine.spec import EngineSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.engines import PolicyFacts, _engine_spec, engine_seed, kv_cache_bytes
from colocate_rl.placement import Placement
from tests.tiny import tiny_config, tiny_tokenizer


def test_seeds_differ_by_run_engine_and_step() -> None:
    seeds = {engine_seed(run, engine, step) for run in range(20) for engine in range(8) for step in (0, 1, 500)}
    assert len(seeds) == 20 * 8 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert engine_seed(3, 1, 5) == engine_seed(3, 1, 5)


@pytest.mark.parametrize(("shards", "share"), [(1, 1), (2, 2), (4, 4)])
def test_the_cache_holds_the_work_with_a_quarter_to_spare(shards: int, share: int) -> None:
    config = tiny_config(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, layers=28)
    wanted = kv_cache_bytes(config, num_tokens=1000, value_bytes=2, tensor_parallel_size=shards, room_bytes=2**40)
    assert wanted == int(1.25 * 1000 * 2 * 28 * (4 // share) * 128 * torch.bfloat16.itemsize)


def test_a_cache_that_would_fill_the_device_is_left_to_vllm() -> None:
    config = tiny_config()
    assert kv_cache_bytes(config, num_tokens=10**6, value_bytes=4, tensor_parallel_size=1, room_bytes=2**30) is None


def spec_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> EngineSpec:
    """The engine of a run with 4 prompts x 8 completions of up to 100 tokens, on a device of 16 GiB."""
    config = tiny_config()
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=32, max_completion_length=100, **settings)
    monkeypatch.setattr(GRPOConfig, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**34))
    placement = Placement.on_gpus(num_ranks=1, num_engines=1, num_devices=1, devices=[0])
    facts = PolicyFacts(config, torch.bfloat16, window=200, longest_prompt=50, tokenizer=tiny_tokenizer())
    return _engine_spec(args, placement, placement.shards[0], facts, port=None)


@pytest.mark.parametrize("share", [None, 0.3])
def test_an_engine_takes_a_cache_for_its_work_also_of_a_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float | None
) -> None:
    spec = spec_on_a_gpu(monkeypatch, tmp_path, vllm_gpu_memory_utilization=share)
    expected = {"num_tokens": 32 * 150, "value_bytes": 2, "tensor_parallel_size": 1, "room_bytes": 2**34}
    assert spec.kv_cache_bytes == kv_cache_bytes(spec.model_config, **expected)
    assert spec.gpu_memory_utilization == (share or 0.9)


@pytest.mark.parametrize(
    "settings",
    [{"vllm_gpu_memory_utilization": 1e-4}, {"vllm_engine_kwargs": {"gpu_memory_utilization": 0.5}}],
    ids=["no room", "the user's own"],
)
def test_a_share_that_is_too_small_or_vllms_own_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert spec_on_a_gpu(monkeypatch, tmp_path, **settings).kv_cache_bytes is None


def test_what_comes_from_the_hosts_memory_is_waited_for_on_the_engines_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    engine = VllmEngine.__new__(VllmEngine)
    engine._device = torch.device("cuda", 1)
    engine._llm = SimpleNamespace(reset_prefix_cache=lambda: True)
    engine._settle([torch.zeros(1)])  # as quantised base weights do
    assert waited == [engine._device]
