"""Sizes of CUDA graphs: one for a step of all sequences, whatever their number."""

import pytest

from colocate_rl.engine.spec import EngineSpec, graph_sizes, llm_arguments

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("count", [1, 4, 8, 248, 256, 272, 512])
def test_vllms_own_sizes_are_left_alone_where_they_do(count: int) -> None:
    assert graph_sizes(count) is None


@pytest.mark.parametrize("count", [3, 12, 100, 250, 260, 264, 300, 511, 513, 600, 768, 1000, 1024, 2048])
def test_a_step_of_all_sequences_has_a_graph_and_little_is_padded(count: int) -> None:
    sizes = graph_sizes(count)
    assert sizes is not None
    assert sizes == sorted(set(sizes))
    assert count in sizes  # the engine has no graph of a decode step with more requests than it may run
    for running in range(1, count + 1):
        padded = next(size for size in sizes if size >= running)
        assert padded - running < (8 if running <= 256 else 16 if running <= 512 else 32)
    assert len(sizes) <= 35 + 16 + count // 32 + 1


def spec(**changes: object) -> EngineSpec:
    values: dict[str, object] = {
        **{"model_config": None, "checkpoint": {}, "dtype": "bfloat16", "device": 0, "seed": 0},
        **{"max_model_length": 512, "max_num_seqs": 1024, "gpu_memory_utilization": 0.9, "enforce_eager": False},
    }
    return EngineSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_engines_with_graphs_on_a_gpu_get_them() -> None:
    assert llm_arguments(spec(), "folder", None)["cudagraph_capture_sizes"] == graph_sizes(1024)


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"device": None},
        {"extra": {"compilation_config": {"cudagraph_capture_sizes": [8]}}},
        {"extra": {"max_num_seqs": 64}},
    ],
)
def test_users_and_devices_without_graphs_keep_their_own(changes: dict[str, object]) -> None:
    assert llm_arguments(spec(**changes), "folder", None).get("cudagraph_capture_sizes") is None
