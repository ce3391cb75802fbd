"""Gathers of unequal parts, reductions, failing together, and figures whose names differ by rank."""

import contextlib
import io
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.errors import PeerError
from colocate_rl.metrics import MetricBuffer
from tests.ranks.launch import Raised, Ranks, outcome

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float32, torch.bfloat16]
COUNTS = [(3, 1, 2), (0, 4, 1), (0, 0, 1), (0, 0, 0), (2, 2, 2)]
TAILS: list[tuple[int, ...]] = [(), (3,), (2, 0), (2, 3)]

Run = Callable[..., list[Any]]


@pytest.fixture(params=[1, 3], ids=["W1", "W3"])
def run(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Run:
    """Runs a function on three ranks, or in this process, which has no group at all."""
    if request.param == 3:
        return ranks(3).run
    return lambda function, *arguments: [function(*arguments)]


def values_of(rank: int, count: int, tail: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 200, (count, *tail), generator=generator).to(dtype)


def gather_on_rank(counts: tuple[int, ...], tail: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    collectives = Collectives(torch.device("cpu"))
    mine = values_of(collectives.rank, counts[collectives.rank], tail, dtype)
    kept = mine.clone()
    parts = collectives.gather_ragged(mine)
    assert torch.equal(mine, kept)
    return parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_gather_ragged(run: Run, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    for counts in COUNTS:
        results = run(gather_on_rank, counts, tail, dtype)
        expected = [values_of(rank, counts[rank], tail, dtype) for rank in range(len(results))]
        for parts in results:
            assert len(parts) == len(expected)
            for part, wanted in zip(parts, expected, strict=True):
                assert part.dtype == dtype
                assert part.shape == wanted.shape
                assert torch.equal(part, wanted)


def gather_views_on_rank() -> list[torch.Tensor]:
    collectives = Collectives(torch.device("cpu"))
    table = torch.arange(24).view(4, 6) + 100 * collectives.rank
    parts = collectives.gather_ragged(table.t()[collectives.rank :, ::2])
    parts[0].add_(0)  # results are ordinary tensors of their own
    return parts


def test_gather_ragged_of_a_strided_view(run: Run) -> None:
    results = run(gather_views_on_rank)
    for parts in results:
        for rank, part in enumerate(parts):
            assert torch.equal(part, (torch.arange(24).view(4, 6) + 100 * rank).t()[rank:, ::2])


def reduce_on_rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]]:
    collectives = Collectives(torch.device("cpu"))
    mine = torch.tensor([[1.0, -2.0], [float(collectives.rank), 0.5]], dtype=torch.float64)
    kept = mine.clone()
    total, top = collectives.sum(mine), collectives.max(mine * (collectives.rank - 1))
    assert torch.equal(mine, kept), "a reduction must not write into its argument"
    whole = collectives.sum(torch.tensor([2**40 + collectives.rank]))
    objects = collectives.gather_objects({"rank": collectives.rank, "nested": [[collectives.rank], []]})
    return total, top, whole, objects


def test_sum_max_and_objects(run: Run) -> None:
    results = run(reduce_on_rank)
    size = len(results)
    ranks = range(size)
    for total, top, whole, objects in results:
        assert total.tolist() == [[size, -2.0 * size], [sum(ranks), 0.5 * size]]
        assert top.tolist() == [
            [max(rank - 1.0 for rank in ranks), max(-2.0 * (rank - 1) for rank in ranks)],
            [max(rank * (rank - 1.0) for rank in ranks), max(0.5 * (rank - 1) for rank in ranks)],
        ]
        assert whole.tolist() == [size * 2**40 + sum(ranks)]
        assert objects == [{"rank": rank, "nested": [[rank], []]} for rank in ranks]


# Failing together


def fail_in_turn(plan: list[list[int]]) -> list[Any]:
    """One block per entry of the plan, which names the ranks that raise in it."""
    collectives = Collectives(torch.device("cpu"))

    def block(number: int, failing: list[int]) -> str:
        with collectives.failing_together(f"doing number {number}"):
            if collectives.rank in failing:
                raise KeyError(f"rank {collectives.rank} in number {number}")
        return "fine"

    return [outcome(block, number, failing) for number, failing in enumerate(plan)]


def test_blocks_in_sequence_fail_each_on_its_own(ranks: Callable[[int], Ranks]) -> None:
    plan: list[list[int]] = [[], [1], [0, 2], [], [2], [0, 1, 2], []]
    results = ranks(3).run(fail_in_turn, plan)
    for number, failing in enumerate(plan):
        for rank, answers in enumerate(results):
            answer = answers[number]
            if not failing:
                assert answer == "fine"
            elif rank == failing[0]:
                assert (answer.kind, answer.message) == ("KeyError", f"'rank {rank} in number {number}'")
            else:
                assert answer.kind == "PeerError"
                said = f"rank {rank} stops because rank {failing[0]} failed while doing number {number} (KeyError)"
                assert said in answer.message


def test_one_process_raises_its_own_error() -> None:
    fine, raised, *_ = fail_in_turn([[], [0]])
    assert fine == "fine"
    assert isinstance(raised, Raised)
    assert (raised.kind, raised.message) == ("KeyError", "'rank 0 in number 1'")


def fail_nested(failing: int, outer: bool) -> Any:
    collectives = Collectives(torch.device("cpu"))

    def blocks() -> str:
        with collectives.failing_together("the outer thing"):
            with collectives.failing_together("the inner thing"):
                if collectives.rank == failing and not outer:
                    raise KeyError("the cause")
            if collectives.rank == failing and outer:
                raise KeyError("the cause")
        return "fine"

    raised = outcome(blocks)
    return raised, collectives.sum(torch.ones(1)).item()


@pytest.mark.parametrize("failing", [0, 1, 2, -1])
def test_nested_blocks_that_fail_in_the_outer_one(ranks: Callable[[int], Ranks], failing: int) -> None:
    results = ranks(3).run(fail_nested, failing, True)
    expected = [("KeyError" if rank == failing else "PeerError") if failing >= 0 else None for rank in range(3)]
    assert [getattr(raised, "kind", None) for raised, _ in results] == expected
    assert [total for _, total in results] == [3.0] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_nested_blocks_that_fail_in_the_inner_one_show_the_cause(ranks: Callable[[int], Ranks], failing: int) -> None:
    results = ranks(3).run(fail_nested, failing, False)
    kinds = [raised.kind for raised, _ in results]
    assert kinds == ["KeyError" if rank == failing else "PeerError" for rank in range(3)]
    assert [total for _, total in results] == [3.0] * 3


def peer_error_on_stderr() -> tuple[str, str, bool]:
    """What an uncaught PeerError and another error print."""
    collectives = Collectives(torch.device("cpu"))
    before, printed = sys.excepthook, []
    fallback = io.StringIO()
    sys.excepthook = lambda kind, value, trace: fallback.write(f"{kind.__name__}: {value}")  # the user's own hook
    for _ in range(2):  # the second time nothing is wrapped again
        try:
            with collectives.failing_together("saving"):
                if collectives.rank == 0:
                    raise ValueError("the cause")
        except PeerError as error:
            text = io.StringIO()
            with contextlib.redirect_stderr(text):
                sys.excepthook(type(error), error, error.__traceback__)
            printed.append(text.getvalue())
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(KeyError, KeyError("other"), None)
    sys.excepthook = before
    return "".join(printed[-1:]), fallback.getvalue(), len(set(printed)) <= 1


def test_a_peer_prints_one_line_and_the_cause_goes_to_the_usual_hook(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(peer_error_on_stderr)
    assert results[0] == ("", "ValueError: the causeValueError: the causeKeyError: 'other'", True)
    for rank in (1, 2):
        line, fallback, same = results[rank]
        assert line.startswith(f"colocate_rl: rank {rank} stops because rank 0 failed while saving (ValueError)")
        assert line.count("\n") == 1
        assert "Traceback" not in line
        assert same
        assert fallback == "KeyError: 'other'"


# Figures


def flush_on_rank() -> list[dict[str, float | None]]:
    collectives = Collectives(torch.device("cpu"))
    rank = collectives.rank
    buffer = MetricBuffer()
    buffer.mean("by all", rank)
    buffer.mean("by all", torch.tensor(4.0))
    buffer.mean("sometimes nan", math.nan if rank else 5.0)
    buffer.mean("always nan", math.nan)
    buffer.share("tokens", torch.tensor(float(rank)), torch.tensor(10.0 + rank))
    buffer.share("nothing", torch.tensor(0.0), torch.tensor(0.0))
    buffer.largest("top", torch.tensor(-5.0 - rank))
    buffer.smallest("bottom", torch.tensor(3.0 + rank))
    buffer.largest("no top", torch.tensor(math.nan))
    buffer.smallest("no bottom", torch.tensor(math.nan))
    buffer.total("total", 2.0)
    buffer.total("total", 3.0)
    buffer.latest("latest", 1.0)
    buffer.latest("latest", 7.0)
    if rank == 1:
        buffer.mean("z of one", 8.0)
        buffer.mean("a of one", 9.0)
        buffer.largest("peak of one", torch.tensor(-1.0))
    if rank == 2:
        buffer.mean("of two", -2.0)
        buffer.smallest("low of two", torch.tensor(-4.0))
    return [buffer.flush(collectives), buffer.flush(collectives)]


def test_flush_joins_names_of_all_ranks(run: Run) -> None:
    results = run(flush_on_rank)
    size = len(results)
    expected: dict[str, float | None] = {
        "by all": (sum(range(size)) + 4 * size) / (2 * size),
        "sometimes nan": 5.0,
        "always nan": None,
        "tokens": sum(range(size)) / sum(range(10, 10 + size)),
        "nothing": None,
        "top": -5.0,
        "bottom": 3.0,
        "no top": None,
        "no bottom": None,
        "total": 5.0,
        "latest": 7.0,
    }
    if size == 3:
        expected |= {"z of one": 8.0, "a of one": 9.0, "peak of one": -1.0, "of two": -2.0, "low of two": -4.0}
    for first, second in results:
        assert first == expected
        assert second == {"latest": 7.0}


def flush_with_one_talking() -> dict[str, float | None]:
    collectives = Collectives(torch.device("cpu"))
    buffer = MetricBuffer()
    if collectives.rank == 2:
        buffer.mean("only here", 1.5)
        buffer.largest("peak", torch.tensor(2.5))
    return buffer.flush(collectives)


def test_flush_when_one_rank_alone_has_figures(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(flush_with_one_talking) == [{"only here": 1.5, "peak": 2.5}] * 3
