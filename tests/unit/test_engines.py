"""From the configuration to how an engine is built."""

import pytest
import torch

from colocate_rl.engines import engine_seed, kv_cache_bytes
from tests.tiny import tiny_config


def test_seeds_differ_by_run_engine_and_step() -> None:
    seeds = {engine_seed(run, engine, step) for run in range(20) for engine in range(8) for step in (0, 1, 500)}
    assert len(seeds) == 20 * 8 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert engine_seed(3, 1, 5) == engine_seed(3, 1, 5)


@pytest.mark.parametrize(("shards", "share"), [(1, 1), (2, 2), (4, 4)])
def test_the_cache_holds_the_work_with_a_quarter_to_spare(shards: int, share: int) -> None:
    config = tiny_config(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, layers=28)
    wanted = kv_cache_bytes(config, num_tokens=1000, value_bytes=2, tensor_parallel_size=shards, device_bytes=2**40)
    assert wanted == int(1.25 * 1000 * 2 * 28 * (4 // share) * 128 * torch.bfloat16.itemsize)


def test_a_cache_that_would_fill_the_device_is_left_to_vllm() -> None:
    config = tiny_config()
    assert kv_cache_bytes(config, num_tokens=10**6, value_bytes=4, tensor_parallel_size=1, device_bytes=2**30) is None
