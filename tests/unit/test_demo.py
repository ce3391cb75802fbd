"""The demo's layouts: every number of GPUs gets one that fits, with nothing idle."""

import pytest

from colocate_rl.placement import Placement
from examples.addition.demo import choose_layout

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("num_gpus", range(1, 17))
def test_each_number_of_gpus_gets_a_layout_that_uses_them_all(num_gpus: int) -> None:
    layout = choose_layout(num_gpus)
    flags = dict(zip(layout.flags[::2], layout.flags[1::2], strict=True))
    named = flags.get("--vllm_devices")
    placement = Placement.on_gpus(
        num_ranks=layout.num_ranks,
        num_engines=layout.num_engines,
        num_devices=num_gpus,
        devices=None if named is None else [int(device) for device in named.split(",")],
    )
    used = {*range(layout.num_ranks), *(shard.device for shard in placement.shards)}
    assert used == set(range(num_gpus))
    if placement.shared_devices:
        assert 0 < float(flags["--vllm_gpu_memory_utilization"]) < 0.5
    assert layout.num_rows * layout.num_ranks >= 256


def test_the_cpu_gets_two_ranks_with_an_engine_each() -> None:
    layout = choose_layout(0)
    assert (layout.num_ranks, layout.num_engines, layout.flags) == (2, 2, ())
