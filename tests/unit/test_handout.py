"""Who answers what: everything once, evenly, longest first; and what engines take from each other."""

import itertools
import multiprocessing
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_rl.balance import deal, imbalance
from colocate_rl.engine.claims import FileClaims
from colocate_rl.engine.protocol import Request, Work
from colocate_rl.rollout.handout import ExpectedLengths, Group, Plan, plan

pytestmark = pytest.mark.unit


def pairs(given_plan: Plan, positions: list[int]) -> list[tuple[int, int]]:
    """(group, copy) of some parts."""
    parts = [given_plan.parts[position] for position in positions]
    assert all(part.num_copies >= 1 for part in parts), "an engine is never asked for nothing"
    return [(part.group, part.first_copy + offset) for part in parts for offset in range(part.num_copies)]


@settings(deadline=None)
@given(
    copies=st.lists(st.integers(1, 9), max_size=20),
    engines=st.integers(1, 9),
    capacity=st.one_of(st.none(), st.integers(1, 30)),
    data=st.data(),
)
def test_every_copy_is_someones_and_engines_start_evenly(
    copies: list[int], engines: int, capacity: int | None, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.floats(0, 100), min_size=len(copies), max_size=len(copies)))
    made = plan(copies, costs, engines, capacity)
    shares = [pairs(made, own) for own in made.own]
    wanted = [(group, copy) for group, count in enumerate(copies) for copy in range(count)]
    assert sorted(itertools.chain(*shares, pairs(made, made.common))) == wanted, "each copy once"
    idle = sum(not share for share in shares)
    assert idle == max(0, engines - len(wanted)), "an engine idles only when no copy is left for it"
    if len(copies) < engines:
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1, "copies are spread"
        assert not made.common
        return
    for own in made.own:
        assert [costs[made.parts[p].group] for p in own] == sorted(
            (costs[made.parts[p].group] for p in own), reverse=True
        )
    if capacity is None or engines == 1:
        assert not made.common
        numbers = [len(own) for own in made.own]
        assert max(numbers) - min(numbers) <= 1, "whole groups, evenly many"
    else:
        assert all(len(share) <= capacity or len(own) == 1 for share, own in zip(shares, made.own, strict=True))
    left = [costs[made.parts[position].group] for position in made.common]
    assert left == sorted(left, reverse=True)


def test_by_hand() -> None:
    made = plan([2, 2, 2, 2, 2], [1, 9, 3, 5, 7], 2)
    assert made.own == [[1, 2, 0], [4, 3]]  # 9 + 3 + 1 against 7 + 5
    made = plan([2, 2, 2, 2, 2], [1, 9, 3, 5, 7], 2, capacity=3)
    assert (made.own, made.common) == ([[1], [4]], [3, 2, 0])
    spread = plan([3], [1], 2)
    assert [pairs(spread, own) for own in spread.own] == [[(0, 0), (0, 1)], [(0, 2)]]


@settings(deadline=None)
@given(
    costs=st.lists(st.floats(0, 100), min_size=1, max_size=60),
    parts=st.integers(1, 6),
)
def test_dealing_gives_each_item_once_and_is_near_the_best(costs: list[float], parts: int) -> None:
    dealt = deal(costs, [len(costs)] * parts)
    assert sorted(itertools.chain(*dealt)) == list(range(len(costs)))
    loads = [sum(costs[item] for item in part) for part in dealt]
    # Graham's bound for any list schedule: the last item of the fullest part was given to the emptiest.
    assert max(loads) <= sum(costs) / parts + max(costs) + 1e-9


def test_dealing_keeps_to_room_and_counts_what_is_there() -> None:
    assert [len(part) for part in deal([5, 4, 3, 2, 1, 1], [2, 2, 2])] == [2, 2, 2]
    assert deal([3, 3], [2, 2], [10, 0]) == [[], [0, 1]]
    assert deal([3, 3], [2, 1], [10, 0]) == [[1], [0]]


def test_imbalance() -> None:
    assert imbalance([2, 2, 2]) == 1
    assert imbalance([6, 0, 0]) == 3
    assert imbalance([0, 0]) == 1


def test_a_prompt_is_expected_to_be_as_long_as_last_time() -> None:
    expected = ExpectedLengths()
    groups = [Group(7, (1, 2), 4), Group(8, (1,), 4), Group(9, (1, 2, 3), 2)]
    assert expected.costs(groups) == [2, 1, 3]  # nothing known but the prompts
    expected.note(7, [10, 20])
    expected.note(8, [1, 1, 1])
    expected.note(8, [4, 6])
    assert expected.costs(groups) == [2 + 4 * 15, 1 + 4 * 5, 3 + 2 * statistics.mean([15, 5])]


def claim_many(path: Path, number: int, out: "multiprocessing.Queue[list[int]]") -> None:
    claims = FileClaims(path)
    out.put([claims.next() for _ in range(number)])


def test_processes_share_a_counter(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    children = [context.Process(target=claim_many, args=(tmp_path / "1", 50, out)) for _ in range(3)]
    for child in children:
        child.start()
    numbers = [out.get(timeout=30) for _ in children]
    for child in children:
        child.join()
    assert sorted(itertools.chain(*numbers)) == list(range(150))
    assert all(mine == sorted(mine) for mine in numbers)


def test_common_requests_are_claimed_after_the_own(tmp_path: Path) -> None:
    requests = [Request((number,), 1) for number in range(5)]
    one, other = (Work(requests, 2, FileClaims(tmp_path / "1")) for _ in range(2))
    assert [one.claim(), other.claim(), one.claim(), one.claim(), other.claim(), one.claim()] == [2, 3, 4, *[None] * 3]
    assert Work.of(requests).claim() is None
