"""Who hosts what on which device: every size up to 16 devices, every refusal, and how work is cut into slices."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocate_rl.errors import ConfigError, PlacementError
from colocate_rl.placement import Placement, Shard, launch_line, split_evenly

pytestmark = pytest.mark.unit

MOST_DEVICES = 16
LINE = re.compile(
    r"accelerate launch --num_processes (\d+) \.\.\. --num-vllm-gpus (\d+)"
    r"(?: --vllm-tensor-parallel-size (\d+))?"
)


def is_valid(ranks: int, engines: int, size: int, devices: int) -> bool:
    """The rule of the design, for engines on devices of their own and none idle."""
    return min(ranks, engines, size) >= 1 and engines * size <= ranks and ranks + engines * size == devices


def plan(ranks: int, engines: int, size: int, devices: int) -> Placement:
    return Placement.on_gpus(num_ranks=ranks, num_engines=engines, num_devices=devices, tensor_parallel_size=size)


def check_table(placement: Placement, ranks: int, engines: int, size: int) -> None:
    """Engine e's shard j lives in local rank e*t+j on device W+e*t+j; nothing is used twice."""
    assert placement.shards == tuple(
        Shard(engine=e, index=j, local_rank=e * size + j, device=ranks + e * size + j)
        for e in range(engines)
        for j in range(size)
    )
    devices = [shard.device for shard in placement.shards]
    assert devices == list(range(ranks, ranks + engines * size)), "each engine device exactly once"
    hosts = [shard.local_rank for shard in placement.shards]
    assert len(set(hosts)) == len(hosts)
    assert set(hosts) <= set(range(ranks))
    for rank in range(ranks):
        shard = placement.shard_of(rank)
        assert (shard is None) == (rank >= engines * size)
        assert shard is None or shard.local_rank == rank
    for engine in range(engines):
        first = placement.shard_of(placement.host_of(engine))
        assert first is not None
        assert (first.engine, first.index) == (engine, 0)
    assert placement.shared_devices == ()


@pytest.mark.parametrize("devices", range(1, MOST_DEVICES + 1))
def test_every_size_is_placed_as_designed_or_refused(devices: int) -> None:
    sizes = itertools.product(range(MOST_DEVICES + 2), range(MOST_DEVICES + 1), (0, 1, 2, 3, 4, 8, 16))
    num_valid = 0
    for ranks, engines, size in sizes:
        if is_valid(ranks, engines, size, devices):
            check_table(plan(ranks, engines, size, devices), ranks, engines, size)
            num_valid += 1
            continue
        with pytest.raises(PlacementError) as caught:
            plan(ranks, engines, size, devices)
        check_refusal(str(caught.value), ranks, engines, size, devices)
    assert num_valid == sum(devices // (2 * size) for size in (1, 2, 3, 4, 8, 16))


def check_refusal(text: str, ranks: int, engines: int, size: int, devices: int) -> None:
    """The message holds the numbers that matter, and any launch line in it works."""
    numbers = {int(number) for number in re.findall(r"\d+", text)}
    if ranks < 1:
        expected = {ranks}
    elif size < 1:
        expected = {size}
    elif engines < 1:
        expected = {engines, devices}
    else:
        expected = {ranks, engines * size, devices}
    assert expected <= numbers, text
    if min(ranks, size) >= 1 and devices >= 2 * size:
        assert LINE.search(text), f"a launch line exists but is not shown: {text}"
    for processes, num_engines, tensor_parallel in LINE.findall(text):
        suggested = (int(processes), int(num_engines), int(tensor_parallel or 1))
        assert suggested[2] == size, "the line keeps the asked tensor-parallel size"
        check_table(plan(*suggested, devices), *suggested)
        if is_valid(devices - engines * size, engines, size, devices):
            assert suggested[1] == engines, "the line keeps the asked number of engines"


@given(st.integers(1, 64), st.integers(0, 40), st.integers(1, 8))
def test_launch_line_works_whenever_there_is_one(devices: int, engines: int, size: int) -> None:
    line = launch_line(devices, engines, size)
    assert (line is None) == (devices < 2 * size)
    if line is not None:
        found = LINE.fullmatch(line)
        assert found, line
        processes, num_engines = int(found[1]), int(found[2])
        assert int(found[3] or 1) == size
        assert plan(processes, num_engines, size, devices).num_engines == num_engines


@pytest.mark.parametrize(
    ("ranks", "engines", "size", "devices", "words"),
    [
        (8, 1, 1, 8, "Lower --num_processes"),  # one process per GPU and none left for the engine
        (2, 1, 1, 8, "5 would stand idle"),
        (1, 2, 1, 3, "at least 2"),  # more engines than ranks to host them
        (2, 0, 1, 4, "at least 1"),
        (1, 1, 1, 8, "6 would stand idle"),  # one process with many visible GPUs
        (1, 1, 1, 1, "--vllm-devices"),  # one GPU: only by sharing it
        (0, 1, 1, 2, "--num_processes"),
        (2, 1, 0, 4, "vllm_tensor_parallel_size"),
    ],
)
def test_refusals_say_what_to_change(ranks: int, engines: int, size: int, devices: int, words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        plan(ranks, engines, size, devices)


def test_placement_errors_are_configuration_errors() -> None:
    assert issubclass(PlacementError, ConfigError)
    assert issubclass(PlacementError, ValueError)


def test_too_many_shards_never_advises_zero_engines() -> None:
    """One rank cannot host an engine of two shards; "at most 0 engines" would be no advice."""
    with pytest.raises(PlacementError) as caught:
        plan(1, 1, 2, 3)
    assert "at most 0" not in str(caught.value)


# vllm_devices


def named(devices: list[int], *, ranks: int, engines: int, count: int, size: int = 1) -> Placement:
    return Placement.on_gpus(
        num_ranks=ranks,
        num_engines=engines,
        num_devices=count,
        tensor_parallel_size=size,
        devices=devices,
    )


def test_named_devices_are_used_in_shard_order() -> None:
    placement = named([5, 3, 4, 2], ranks=4, engines=2, size=2, count=8)
    table = [(s.engine, s.index, s.local_rank, s.device) for s in placement.shards]
    assert table == [(0, 0, 0, 5), (0, 1, 1, 3), (1, 0, 2, 4), (1, 1, 3, 2)]
    assert placement.shared_devices == (2, 3)


def test_two_engines_or_two_shards_fit_on_two_gpus_by_sharing() -> None:
    crossed = named([1, 0], ranks=2, engines=2, count=2)
    assert [shard.device for shard in crossed.shards] == [1, 0]
    assert crossed.shared_devices == (0, 1)
    sharded = named([1, 0], ranks=2, engines=1, size=2, count=2)
    assert [(shard.engine, shard.index) for shard in sharded.shards] == [(0, 0), (0, 1)]


def test_named_devices_may_leave_others_idle() -> None:
    placement = named([7], ranks=2, engines=1, count=8)
    assert placement.shards[0].device == 7
    assert placement.shared_devices == ()


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([2], ["1 device(s)", "Name exactly 2"]),
        ([2, 3, 1], ["3 device(s)", "2,3,1", "Name exactly 2"]),
        ([], ["0 device(s)", "Name exactly 2"]),
        ([3, 3], ["3,3", "GPU 3 twice"]),
        ([3, 4], ["3,4", "GPU 4", "counts 4", "0 to 3"]),
        ([-1, 3], ["-1,3", "GPU -1", "0 to 3"]),
    ],
)
def test_named_devices_that_cannot_work(devices: list[int], words: list[str]) -> None:
    with pytest.raises(PlacementError) as caught:
        named(devices, ranks=2, engines=2, count=4)
    for word in words:
        assert word in str(caught.value)


def test_named_devices_do_not_excuse_more_ranks_than_gpus() -> None:
    with pytest.raises(PlacementError, match=r"3 training ranks need 3 GPUs but 2 are visible"):
        named([1], ranks=3, engines=1, count=2)


def test_more_engines_than_ranks_is_refused_also_with_named_devices() -> None:
    with pytest.raises(PlacementError, match="needs 2 training rank"):
        named([2, 3], ranks=1, engines=2, count=4)


@given(data=st.data(), count=st.integers(1, 16))
def test_named_devices_in_general(data: st.DataObject, count: int) -> None:
    ranks = data.draw(st.integers(1, count))
    engines = data.draw(st.integers(1, ranks))
    devices = data.draw(st.lists(st.integers(0, count - 1), min_size=engines, max_size=engines, unique=True))
    placement = named(devices, ranks=ranks, engines=engines, count=count)
    assert [shard.device for shard in placement.shards] == devices
    assert [shard.local_rank for shard in placement.shards] == list(range(engines))
    assert placement.shared_devices == tuple(sorted(d for d in devices if d < ranks))


# CPU


def test_on_cpu_ranks_and_engines_share_cores() -> None:
    placement = Placement.on_cpu(num_ranks=3, num_engines=2, num_cores=1)
    assert [(s.engine, s.local_rank, s.device) for s in placement.shards] == [
        (0, 0, None),
        (1, 1, None),
    ]
    pinned = Placement.on_cpu(num_ranks=2, num_engines=2, num_cores=2, devices=[1, 0])
    assert [shard.device for shard in pinned.shards] == [1, 0]
    assert pinned.shared_devices == ()


@pytest.mark.parametrize(
    ("ranks", "engines", "devices", "words"),
    [
        (2, 3, None, "needs 3 training rank"),
        (2, 0, None, "num_vllm_gpus is 0"),
        (2, 2, [0, 2], "CPU core 2"),
        (2, 2, [0, 0], "CPU core 0 twice"),
        (2, 2, [0], "Name exactly 2"),
    ],
)
def test_on_cpu_refusals(ranks: int, engines: int, devices: list[int] | None, words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        Placement.on_cpu(num_ranks=ranks, num_engines=engines, num_cores=2, devices=devices)


def test_the_table_reads_as_the_placement() -> None:
    lines = str(plan(3, 1, 2, 5)).splitlines()
    assert lines[0] == "3 training rank(s), 1 engine(s)"
    assert "rank 1: trains on device 1, hosts engine 0 shard 1 on device 4" in lines[2]
    assert lines[3].endswith("hosts -")


# Slices (C1)


@pytest.mark.parametrize("parts", range(1, 9))
def test_split_evenly(parts: int) -> None:
    for total in range(41):
        ranges = split_evenly(total, parts)
        sizes = [len(part) for part in ranges]
        assert len(ranges) == parts, "always as many slices as engines"
        assert max(sizes) - min(sizes) <= 1
        assert [item for part in ranges for item in part] == list(range(total))
        assert sizes.count(0) == max(0, parts - total), "idle only where there is less than one each"
        assert sizes == sorted(sizes, reverse=True)
