"""An engine's private view of the process: a world of its own inside, everything as before outside, bit for bit.

The worst that an engine does to its process is done by :func:`disturb`, in one process without a group and on the first
K of three gloo ranks, at every debug level of ``torch.distributed``.
"""

import contextlib
import gc
import logging
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist  # noqa: TID251 - what an engine does inside is the subject
import torch.distributed.distributed_c10d as c10d  # noqa: TID251

from colocate_rl.isolation import PrivateProcess
from tests.ranks.launch import Ranks, launcher_variables

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

LEVELS = ["OFF", "INFO", "DETAIL"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

Case = Callable[[Path], Any]

PRIVATE_GROUPS: list[str] = []
"""Names that this process's cases have put into the process-wide registry of groups."""


# What is compared


def snapshot() -> dict[str, Any]:
    """Everything of the process that an entry must leave as it was, as values that can be compared and sent."""
    numpy = np.random.get_state()
    state: dict[str, Any] = {
        "environment": dict(os.environ),
        "python random": random.getstate(),
        "numpy random": pickle.dumps(numpy),
        "torch random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": id(torch.set_num_threads),
        "affinity": sorted(os.sched_getaffinity(0)),
        "root level": logging.root.level,
        "root handlers": [id(handler) for handler in logging.root.handlers],
        "logging disabled": logging.root.manager.disable,
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "frozen objects": gc.get_freeze_count(),
        "exception hook": id(sys.excepthook),
        "folder": str(Path.cwd()),
        "initialized": dist.is_initialized(),
    }
    if dist.is_initialized():
        state["world"] = (dist.get_rank(), dist.get_world_size(), id(dist.group.WORLD), dist.get_backend())
    for module in (dist, c10d):
        for name, value in vars(module).items():
            state[f"{module.__name__}.{name}"] = value if type(value) in (int, str, bool) else id(value)
    for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"):
        state[f"entries of {name}"] = [(id(key), id(value)) for key, value in getattr(c10d, name).items()]
    state["group counter"] = c10d._world.group_count
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def disturb(folder: Path, *, make_groups: bool = True) -> None:
    """What vLLM does to a process, and worse; to be called inside."""
    if make_groups:
        make_private_world(folder)
    os.environ["ADDED_INSIDE"] = "inside"
    os.environ["CHANGED_INSIDE"] = "inside"
    os.environ.pop("REMOVED_INSIDE", None)
    os.environ["WORLD_SIZE"] = "1"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    torch.set_num_threads = lambda nthreads: None
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    logging.root.setLevel(logging.CRITICAL)
    logging.root.handlers.clear()
    logging.root.addHandler(logging.NullHandler())
    logging.disable(logging.ERROR)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    sys.excepthook = lambda kind, value, trace: None
    gc.freeze()


def make_private_world(folder: Path) -> None:
    """The engine's own default group and a further one, each with a collective."""
    assert not dist.is_initialized(), "the trainer's group shows"
    meeting = folder / f"private-{os.getpid()}-{random.SystemRandom().random()}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    PRIVATE_GROUPS.append(dist.group.WORLD.group_name)
    make_private_group()


def make_private_group() -> None:
    further = dist.new_group([0])
    PRIVATE_GROUPS.append(further.group_name)
    for group in (None, further):
        ones = torch.ones(2)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [1.0, 1.0]


def prepare() -> None:
    """A state of the trainer's own in every respect, so that nothing is at a default that an entry could leave."""
    os.environ |= {"CHANGED_INSIDE": "outside", "REMOVED_INSIDE": "outside"}
    os.environ.pop("ADDED_INSIDE", None)
    random.seed(11)
    np.random.seed(12)
    np.random.standard_normal()  # leaves a cached Gaussian in the state
    torch.manual_seed(13)
    torch.set_num_threads(3)
    logging.root.setLevel(logging.INFO)
    torch.set_float32_matmul_precision("medium")


@contextlib.contextmanager
def own_state() -> Iterator[None]:
    """Gives this process back as it was: these tests are not those of the isolation."""
    environment, level, threads = dict(os.environ), logging.root.level, torch.get_num_threads()
    handlers, precision, hook = list(logging.root.handlers), torch.get_float32_matmul_precision(), sys.excepthook
    affinity, signals = os.sched_getaffinity(0), {number: signal.getsignal(number) for number in SIGNALS}
    set_num_threads = torch.set_num_threads
    logging.root.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers
        logging.disable(logging.NOTSET)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(torch.float32)
        sys.excepthook = hook
        os.sched_setaffinity(0, affinity)
        for number, handler in signals.items():
            signal.signal(number, handler)
        gc.unfreeze()
        forget_private_groups()


def forget_private_groups() -> None:
    """Takes the engines' groups out of the registry, so that one case does not decide about the next."""
    while PRIVATE_GROUPS:
        with contextlib.suppress(RuntimeError):
            torch._C._distributed_c10d._unregister_process_group(PRIVATE_GROUPS.pop())


def on_rank(case: Case, num_hosts: int, folder: Path) -> Any:
    """Runs a case on the first ``num_hosts`` ranks; None on the others, which enter nothing."""
    with own_state():
        return case(folder) if not dist.is_initialized() or dist.get_rank() < num_hosts else None


@pytest.fixture(scope="module", params=LEVELS)
def level_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three ranks at one debug level of torch.distributed."""
    group = Ranks(3, tmp_path_factory.mktemp("isolation"), {"TORCH_DISTRIBUTED_DEBUG": request.param})
    yield group
    group.kill()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Ranks]:
    """A group of one, for a test that may leave the trainer's world broken."""
    group = Ranks(1, tmp_path)
    yield group
    group.kill()


@pytest.fixture(params=LEVELS)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, without a group, with a launcher's variables, at one debug level of torch.distributed."""
    for name, value in launcher_variables(0, 1).items():
        monkeypatch.setenv(name, value)
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, request.param))
    yield
    dist.set_debug_level(before)


# Inside


def look_inside(folder: Path) -> dict[str, Any]:
    process = PrivateProcess(None, {"ENGINE_ONLY": "yes", "MASTER_PORT": "4711"})
    with process.entered():
        fresh = {
            "initialized": dist.is_initialized(),
            "launcher": sorted(
                name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name or "TORCHELASTIC" in name
            ),
            "MASTER": {name: value for name, value in os.environ.items() if name.startswith("MASTER_")},
            "own": os.environ.get("ENGINE_ONLY"),
        }
        make_private_world(folder)
        made = {
            "initialized": dist.is_initialized(),
            "world": (dist.get_rank(), dist.get_world_size()),
            "ranks": dist.get_process_group_ranks(dist.group.WORLD),
        }
    with process.entered():
        again = {
            "initialized": dist.is_initialized(),
            "world": (dist.get_rank(), dist.get_world_size()),
            "own": os.environ.get("ENGINE_ONLY"),
            "rank": os.environ.get("RANK"),
        }
    return {"fresh": fresh, "made": made, "again": again, "outside": os.environ.get("ENGINE_ONLY")}


INSIDE = {
    "fresh": {"initialized": False, "launcher": [], "MASTER": {"MASTER_PORT": "4711"}, "own": "yes"},
    "made": {"initialized": True, "world": (0, 1), "ranks": [0]},
    "again": {"initialized": True, "world": (0, 1), "own": "yes", "rank": None},
    "outside": None,
}


def test_inside_is_a_world_of_its_own_alone(alone: None, tmp_path: Path) -> None:
    assert on_rank(look_inside, 1, tmp_path) == INSIDE


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_inside_is_a_world_of_its_own(level_ranks: Ranks, num_hosts: int, tmp_path: Path) -> None:
    results = level_ranks.run(on_rank, look_inside, num_hosts, tmp_path)
    assert results == [INSIDE] * num_hosts + [None] * (3 - num_hosts)


# Afterwards


def leave_normally(folder: Path) -> list[str]:
    return disturbed(folder, fail=False)


def leave_by_exception(folder: Path) -> list[str]:
    return disturbed(folder, fail=True)


def disturbed(folder: Path, *, fail: bool) -> list[str]:
    """What is different after three entries, the first with groups."""
    prepare()
    process = PrivateProcess(None, {"ENGINE_ONLY": "yes"})
    changed: list[str] = []
    for number in range(3):
        before = snapshot()
        with contextlib.suppress(ZeroDivisionError), process.entered():
            disturb(folder, make_groups=number == 0)
            if fail:
                raise ZeroDivisionError
        changed += [f"{number}: {name}" for name in changes(before, snapshot())]
    return changed


@pytest.mark.parametrize("leave", [leave_normally, leave_by_exception])
def test_afterwards_all_is_as_before_alone(alone: None, tmp_path: Path, leave: Case) -> None:
    assert on_rank(leave, 1, tmp_path) == []


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("leave", [leave_normally, leave_by_exception])
def test_afterwards_all_is_as_before(level_ranks: Ranks, num_hosts: int, leave: Case, tmp_path: Path) -> None:
    results = level_ranks.run(on_rank, leave, num_hosts, tmp_path)
    assert results == [[]] * num_hosts + [None] * (3 - num_hosts)


def entries_that_do_nothing(folder: Path) -> list[str]:
    prepare()
    before = snapshot()
    process = PrivateProcess(None, {})
    with process.entered():
        pass
    return changes(before, snapshot())


def test_an_entry_that_does_nothing_changes_nothing(alone: None, tmp_path: Path) -> None:
    assert on_rank(entries_that_do_nothing, 1, tmp_path) == []


def test_the_comparison_sees_every_disturbance(tmp_path: Path) -> None:
    """Without isolation each of the things that are compared differs."""
    with own_state():
        prepare()
        before = snapshot()
        disturb(tmp_path, make_groups=False)
        changed = changes(before, snapshot())
    expected = {
        "environment", "python random", "numpy random", "torch random", "threads", "set_num_threads", "root level",
        "root handlers", "logging disabled", "signals", "exception hook", "default dtype", "matmul precision",
        "frozen objects",
    }  # fmt: skip
    if len(os.sched_getaffinity(0)) > 1:
        expected.add("affinity")
    assert set(changed) == expected


def groups_afterwards(num_hosts: int, folder: Path) -> list[float]:
    """Sums on groups that all ranks make after some of them entered an engine's world."""
    on_rank(leave_normally, num_hosts, folder)
    rank = dist.get_rank()
    sums = []
    everyone = dist.new_group([0, 1, 2])
    pair = dist.new_group([0, 2])
    for group, members in ((None, {0, 1, 2}), (everyone, {0, 1, 2}), (pair, {0, 2})):
        if rank in members:
            mine = torch.tensor([10.0**rank])
            dist.all_reduce(mine, group=group)
            sums.append(mine.item())
    on_rank(look_inside, num_hosts, folder)
    mine = torch.tensor([10.0**rank])
    dist.all_reduce(mine, group=everyone)
    return [*sums, mine.item()]


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_the_trainers_later_groups_work(level_ranks: Ranks, num_hosts: int, tmp_path: Path) -> None:
    results = level_ranks.run(groups_afterwards, num_hosts, tmp_path)
    assert results == [[111.0, 111.0, 101.0, 111.0], [111.0, 111.0, 111.0], [111.0, 111.0, 101.0, 111.0]]


def world_after_the_end(num_hosts: int, folder: Path) -> tuple[float, list[str]]:
    """Inside, the engine destroys all groups at its end, as vLLM does."""
    before = snapshot()
    changed: list[str] = []
    if dist.get_rank() < num_hosts:
        with own_state():
            process = PrivateProcess(None, {})
            with process.entered():
                make_private_world(folder)
            with process.entered():
                dist.destroy_process_group()
                assert not dist.is_initialized()
        changed = changes(before, snapshot())
    mine = torch.ones(1)
    dist.all_reduce(mine, group=dist.new_group([0, 1, 2]))
    return mine.item(), changed


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_an_engine_that_ends_leaves_the_trainers_world(level_ranks: Ranks, num_hosts: int, tmp_path: Path) -> None:
    assert level_ranks.run(world_after_the_end, num_hosts, tmp_path) == [(3.0, [])] * 3


def names_after_the_end(folder: Path, again: bool) -> bool:
    """Whether the trainer's group is still the one found under its name, where device meshes look for it."""
    process = PrivateProcess(None, {})
    with own_state():
        with process.entered():
            make_private_world(folder)
            dist.destroy_process_group()
        if again:
            with process.entered():
                make_private_world(folder)
        world = dist.group.WORLD
        assert world is not None
        try:
            return c10d._resolve_process_group(world.group_name) is world
        except RuntimeError:
            return False


@pytest.mark.parametrize("again", [False, True])
def test_the_trainers_groups_keep_their_names(one_rank: Ranks, again: bool, tmp_path: Path) -> None:
    assert one_rank.run(names_after_the_end, tmp_path, again) == [True]


# Between entries

Draws = list[tuple[float, float, float]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.standard_normal()), torch.rand(()).item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def streams(folder: Path) -> tuple[Draws, Draws, Draws, Draws]:
    """Draws of an engine and a trainer in turns, and what each would draw alone."""
    seed_all(100)
    trainer_alone = [draw() for _ in range(6)]
    seed_all(200)
    engine_alone = [draw() for _ in range(6)]
    process = PrivateProcess(None, {})
    seed_all(100)
    trainer, engine = [draw()], []
    with process.entered():
        seed_all(200)
        engine.append(draw())
    for number in range(5):
        if number % 2:
            trainer.append(draw())
        with process.entered():
            engine.append(draw())
        if not number % 2:
            trainer.append(draw())
    return trainer, trainer_alone, engine, engine_alone


def test_two_streams_of_random_numbers(alone: None, tmp_path: Path) -> None:
    trainer, trainer_alone, engine, engine_alone = on_rank(streams, 1, tmp_path)
    assert trainer == trainer_alone
    assert engine == engine_alone
    assert len(set(engine)) == 6


def test_two_streams_of_random_numbers_on_ranks(level_ranks: Ranks, tmp_path: Path) -> None:
    for trainer, trainer_alone, engine, engine_alone in level_ranks.run(on_rank, streams, 3, tmp_path):
        assert trainer == trainer_alone
        assert engine == engine_alone


def environment_between(folder: Path) -> list[dict[str, str | None]]:
    """Some variables inside, outside and inside again, with changes by both sides."""
    names = ("ADDED", "CHANGED", "REMOVED", "TRAINERS", "RANK")

    def look() -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    os.environ |= {"CHANGED": "outside", "REMOVED": "outside"}
    process = PrivateProcess(None, {})
    seen = []
    with process.entered():
        os.environ |= {"ADDED": "inside", "CHANGED": "inside"}
        del os.environ["REMOVED"]
        seen.append(look())
    seen.append(look())
    os.environ["TRAINERS"] = "new"
    with process.entered():
        seen.append(look())
        del os.environ["ADDED"]
    with process.entered():
        seen.append(look())
    seen.append(look())
    return seen


def test_changes_of_the_environment_stay_inside(alone: None, tmp_path: Path) -> None:
    inside = {"ADDED": "inside", "CHANGED": "inside", "REMOVED": None, "TRAINERS": None, "RANK": None}
    outside = {"ADDED": None, "CHANGED": "outside", "REMOVED": "outside", "TRAINERS": None, "RANK": "0"}
    assert on_rank(environment_between, 1, tmp_path) == [
        inside,
        outside,
        inside | {"TRAINERS": "new"},
        inside | {"TRAINERS": "new", "ADDED": None},
        outside | {"TRAINERS": "new"},
    ]


def kept_inside(folder: Path) -> tuple[list[int], list[list[int]]]:
    """Threads and cores, inside and outside in turns."""
    torch.set_num_threads(3)
    process = PrivateProcess(None, {})
    core = max(os.sched_getaffinity(0))
    threads, cores = [], []
    for number in range(3):
        with process.entered():
            if number == 0:
                torch.set_num_threads(2)
                torch.set_num_threads = lambda nthreads: None
                os.sched_setaffinity(0, {core})
            threads.append(torch.get_num_threads())
            cores.append(sorted(os.sched_getaffinity(0)))
        threads.append(torch.get_num_threads())
    torch.set_num_threads(4)
    threads.append(torch.get_num_threads())
    return threads, cores


def test_the_engine_keeps_its_threads_and_cores(alone: None, tmp_path: Path) -> None:
    threads, cores = on_rank(kept_inside, 1, tmp_path)
    assert threads == [2, 3, 2, 3, 2, 3, 4]
    assert cores == [[max(os.sched_getaffinity(0))]] * 3


def nested(folder: Path) -> tuple[list[str], bool, list[str]]:
    """An entry inside an entry, which fails: still inside afterwards, and all is as before after the outer one."""
    prepare()
    process = PrivateProcess(None, {"ENGINE_ONLY": "yes"})
    before = snapshot()
    with process.entered():
        disturb(folder)
        middle = snapshot()
        with contextlib.suppress(ZeroDivisionError), process.entered():
            torch.rand(())
            raise ZeroDivisionError
        inner = [name for name in changes(middle, snapshot()) if name != "frozen objects"]  # some die meanwhile
        still_inside = dist.get_world_size() == 1 and "RANK" not in os.environ and os.environ["ENGINE_ONLY"] == "yes"
    return inner, still_inside, changes(before, snapshot())


NESTED: tuple[list[str], bool, list[str]] = (["torch random"], True, [])


def test_a_nested_entry_changes_nothing_more_alone(alone: None, tmp_path: Path) -> None:
    assert on_rank(nested, 1, tmp_path) == NESTED


def test_a_nested_entry_changes_nothing_more(level_ranks: Ranks, tmp_path: Path) -> None:
    assert level_ranks.run(on_rank, nested, 2, tmp_path) == [NESTED, NESTED, None]


def two_engines(folder: Path) -> tuple[list[tuple[int, bool]], list[str]]:
    """Two engines in one process, in turns, do not see each other."""
    prepare()
    processes = [PrivateProcess(None, {"NUMBER": str(number)}) for number in range(2)]
    before, seen = snapshot(), []
    with processes[0].entered():
        make_private_world(folder)
    for process in processes:
        with process.entered():
            seen.append((int(os.environ["NUMBER"]), dist.is_initialized()))
    return seen, changes(before, snapshot())


def test_two_engines_do_not_see_each_other(alone: None, tmp_path: Path) -> None:
    assert on_rank(two_engines, 1, tmp_path) == ([(0, True), (1, False)], [])


def build_beside(folder: Path) -> tuple[int, int]:
    """A second engine makes its world while the first one's still stands: it was not closed, or failed half built."""
    first, second = PrivateProcess(None, {}), PrivateProcess(None, {})
    with first.entered():
        make_private_world(folder)
    with second.entered():
        make_private_world(folder)
        inner = dist.get_world_size()
    with first.entered():
        return dist.get_world_size(), inner


def test_a_second_engine_can_be_built_beside_the_first(alone: None, tmp_path: Path) -> None:
    assert on_rank(build_beside, 1, tmp_path) == (1, 1)


def build_again(folder: Path) -> list[float]:
    """An engine ends, another is built in the same private view, and then the trainer makes groups."""
    with own_state():
        process = PrivateProcess(None, {})
        with process.entered():
            make_private_world(folder)
        with process.entered():
            dist.destroy_process_group()
            make_private_world(folder)
            make_private_group()
            make_private_group()
        sums = []
        for _ in range(3):
            mine = torch.ones(1)
            dist.all_reduce(mine, group=dist.new_group([0]))
            sums.append(mine.item())
        return sums


def test_an_engine_that_is_built_again_leaves_the_trainers_names_alone(one_rank: Ranks, tmp_path: Path) -> None:
    assert one_rank.run(build_again, tmp_path) == [[1.0] * 3]
