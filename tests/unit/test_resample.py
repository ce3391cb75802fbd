"""Groups that teach nothing make room for other prompts, place by place and on every rank alike."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.feed import BatchFeed
from colocate_rl.rollout.records import EngineStats
from colocate_rl.rollout.resample import Resampler, _joined, flat_groups, replaced
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered, Rated

pytestmark = pytest.mark.unit

Row = dict[str, Any]
WEIGHTS = torch.tensor([1.0, 0.5])


def row(index: int) -> Row:
    return {PROMPT_INDEX: index, "prompt": f"prompt {index}"}


def rated(rows: Sequence[Row], rewards: Sequence[float], call: int = 0) -> Rated:
    """Rows whose completion says prompt, call and place."""
    completions = [Completion([r[PROMPT_INDEX], call, place], [-1.0] * 3, "stop") for place, r in enumerate(rows)]
    return Rated(
        Answered(list(rows), [(r[PROMPT_INDEX],) for r in rows], completions, [EngineStats(0, call, 1, 1.0)]),
        [f"{r[PROMPT_INDEX]}/{call}/{place}" for place, r in enumerate(rows)],
        torch.tensor([[reward, 0.0] for reward in rewards]).view(-1, 2),
        {f"call {call}": list(range(len(rows)))},
    )


def test_flat_groups_have_equal_or_no_rewards() -> None:
    nan = math.nan
    indices = [7, 7, 3, 3, 9, 9, 1, 1, 4, 4, 3, 7, 9, 1, 4]
    totals = [1.0, 1.0, 0.5, 0.5, nan, nan, 2.0, nan, 0.1, 0.1, 0.6, 1.0, nan, 2.0, 0.1 + 1e-12]
    assert flat_groups(indices, torch.tensor(totals)[:, None], torch.ones(1), "sum_then_normalize") == [7, 9, 1, 4]


def test_what_is_flat_depends_on_how_rewards_are_put_together() -> None:
    """Two functions that cancel out in the sum, and one whose small spread counts only after it is scaled."""
    indices = [3, 3, 5, 5, 8, 8]
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [0.0, 5.0], [2.0, 2.0], [2.0, 2.0]])
    assert flat_groups(indices, rewards, WEIGHTS, "sum_then_normalize") == [3, 8]
    # Scaled by group each of the functions of prompt 3 says +-0.707, and the weights are 1 and 0.5.
    assert flat_groups(indices, rewards, WEIGHTS, "normalize_then_sum") == [8]
    # With equal weights they cancel out once scaled (up to the epsilon in the divisor), whatever their size.
    equal = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 5.0]])
    assert flat_groups(indices[:4], equal, torch.ones(2), "normalize_then_sum") == [3]


def test_new_rows_stand_where_the_old_ones_stood() -> None:
    before = rated([row(i) for i in (5, 5, 8, 8, 2, 5, 2)], [1, 1, 0, 1, 3, 1, 3])
    asked = rated([row(i) for i in (30, 30, 40, 30, 40)], [1, 2, 3, 4, 5], call=1)
    now, gone = replaced(before, {5: row(30), 2: row(40), 77: row(50)}, asked)
    assert now.texts == ["30/1/0", "30/1/1", "8/0/2", "8/0/3", "40/1/2", "30/1/3", "40/1/4"]
    assert [r[PROMPT_INDEX] for r in now.answered.rows] == [30, 30, 8, 8, 40, 30, 40]
    assert now.answered.prompt_ids == [(30,), (30,), (8,), (8,), (40,), (30,), (40,)]
    assert [list(c.token_ids) for c in now.answered.completions] == [
        [int(part) for part in text.split("/")] for text in now.texts
    ]
    assert now.rewards[:, 0].tolist() == [1, 2, 0, 1, 3, 4, 5]
    assert now.extras == {"call 0": [None, None, 2, 3, None, None, None], "call 1": [0, 1, None, None, 2, 3, 4]}
    assert [stat.num_prompts for stat in now.answered.stats] == [0, 1]
    assert gone.texts == ["5/0/0", "5/0/1", "2/0/4", "5/0/5", "2/0/6"]
    assert gone.rewards[:, 0].tolist() == [1, 1, 3, 1, 3]


def test_every_field_goes_with_its_row() -> None:
    def dialogue(index: int, call: int, size: int) -> Rated:
        plain = rated([row(index)] * size, range(size), call)
        everyone = {(index, copy): completion for copy, completion in enumerate(plain.answered.completions)}
        answered = replace(
            plain.answered,
            texts=plain.texts,
            columns={f"column {call}": [f"{index}/{place}" for place in range(size)], "both": [call] * size},
            figures={"tools/calls": (float(size), 2.0 * size), f"only {call}": (1.0, 2.0)},
            places=list(range(size)),
            prompts={index: (index,)},
            everyone=everyone,
        )
        return replace(plain, answered=answered)

    first, second, new = dialogue(5, 0, 2), dialogue(8, 0, 2), dialogue(30, 1, 2)
    before = replaced(first, {}, second)[0]
    assert before.texts == first.texts, "nothing is swapped"
    both = _joined(first, second, [0, 1, 2, 3])
    now, gone = replaced(both, {5: row(30)}, new)
    assert now.answered.texts == now.texts == ["30/1/0", "30/1/1", "8/0/0", "8/0/1"]
    assert gone.answered.texts == gone.texts == ["5/0/0", "5/0/1"]
    assert now.answered.columns == {
        "column 0": [None, None, "8/0", "8/1"],
        "column 1": ["30/0", "30/1", None, None],
        "both": [1, 1, 0, 0],
    }
    assert (now.answered.places, gone.answered.places) == ([0, 1, 2, 3], [0, 1])
    assert now.answered.figures == {"tools/calls": (6.0, 12.0), "only 0": (2.0, 4.0), "only 1": (1.0, 2.0)}
    assert now.answered.prompts == {5: (5,), 8: (8,), 30: (30,)}
    assert now.answered.everyone[30, 1] is new.answered.completions[1]
    assert {f.name for f in fields(Answered)} == {
        "rows", "prompt_ids", "completions", "stats", "texts", "columns", "figures", "places", "prompts", "everyone",
    }, "a new field must be filled too"  # fmt: skip


def refill(
    rewards: dict[int, list[float]], batch: Sequence[int], spares: Sequence[int], max_tries: int
) -> tuple[Rated, list[Rated], dict[str, float | None], list[list[int]]]:
    """Refills a batch of two completions per prompt, whose rewards are given per prompt."""
    asked: list[list[int]] = []

    def answer(rows: Sequence[Row]) -> Rated:
        seen: dict[int, int] = {}
        values = []
        for r in rows:
            index = r[PROMPT_INDEX]
            values.append(rewards[index][seen.get(index, 0)])
            seen[index] = seen.get(index, 0) + 1
        return rated(rows, values, call=len(asked))

    def ask(rows: Sequence[Row]) -> Rated:
        asked.append([r[PROMPT_INDEX] for r in rows])
        return answer(rows)

    collectives, metrics = Collectives(torch.device("cpu")), MetricBuffer()
    first = answer([row(index) for index in batch for _ in range(2)])
    now, gone = Resampler(collectives, WEIGHTS, max_tries).refill(first, map(row, spares), ask, metrics)
    return now, gone, metrics.flush(collectives), asked


REWARDS = {
    0: [1.0, 1.0],
    1: [0.0, 1.0],
    2: [0.0, 0.0],
    10: [5.0, 5.0],
    11: [0.0, 2.0],
    12: [3.0, 3.0],
    13: [3.0, 4.0],
}


def test_tries_until_every_group_has_a_spread() -> None:
    now, gone, figures, asked = refill(REWARDS, [0, 1, 2], [10, 11, 12, 13], max_tries=5)
    assert asked == [[10, 10, 11, 11], [12, 12], [13, 13]]
    assert [r[PROMPT_INDEX] for r in now.answered.rows] == [13, 13, 1, 1, 11, 11]
    assert now.rewards[:, 0].tolist() == [3, 4, 0, 1, 0, 2]
    assert [[r[PROMPT_INDEX] for r in part.answered.rows] for part in gone] == [[0, 0, 2, 2], [10, 10], [12, 12]]
    assert figures == {
        "dynamic_sampling/frac_reward_zero_std": pytest.approx(2 / 3),
        "dynamic_sampling/reward": pytest.approx(0.5),
        "dynamic_sampling/tries": 3.0,
        "dynamic_sampling/prompts": 4.0,
    }


def test_the_last_groups_are_kept_when_the_tries_run_out() -> None:
    now, _, figures, asked = refill(REWARDS, [0, 1, 2], [10, 11, 12, 13], max_tries=2)
    assert asked == [[10, 10, 11, 11], [12, 12]]
    assert [r[PROMPT_INDEX] for r in now.answered.rows] == [12, 12, 1, 1, 11, 11]
    assert figures["dynamic_sampling/tries"] == 2


def test_when_the_spares_run_out_the_rest_is_kept() -> None:
    now, _, figures, asked = refill(REWARDS, [0, 1, 2], [10], max_tries=9)
    assert asked == [[10, 10]]
    assert [r[PROMPT_INDEX] for r in now.answered.rows] == [10, 10, 1, 1, 2, 2]
    assert figures["dynamic_sampling/prompts"] == 1


def test_nothing_is_asked_where_all_groups_have_a_spread() -> None:
    now, gone, figures, asked = refill(REWARDS, [1, 11], [10], max_tries=9)
    assert (asked, gone) == ([], [])
    assert [r[PROMPT_INDEX] for r in now.answered.rows] == [1, 1, 11, 11]
    assert figures["dynamic_sampling/tries"] == 0
    assert figures["dynamic_sampling/frac_reward_zero_std"] == 0


# Spare prompts


def make_feed(rank: int, world_size: int = 2, seed: int = 3) -> BatchFeed:
    rows = [{"prompt": str(number)} for number in range(23)]
    return BatchFeed(
        rows, prompts_per_batch=4, num_generations=3, rank=rank, world_size=world_size, shuffle=True, seed=seed
    )


def spares(feed: BatchFeed, number: int) -> list[int]:
    return [r[PROMPT_INDEX] for r in feed.spares(number)]


def test_spares_are_all_other_prompts_in_an_order_of_their_own() -> None:
    orders = []
    for number in range(12):  # two epochs and a bit
        batch = {r[PROMPT_INDEX] for rank in range(2) for r in make_feed(rank).batch(number)}
        found = spares(make_feed(0), number)
        assert len(batch) == 4
        assert sorted([*batch, *found]) == list(range(23))
        assert found == spares(make_feed(1), number), "ranks agree"
        assert found != spares(make_feed(0, seed=4), number)
        assert [r["prompt"] for r in make_feed(0).spares(number)] == [str(index) for index in found]
        orders.append(found)
    assert len({tuple(order) for order in orders}) == 12


def test_taking_spares_does_not_change_what_comes() -> None:
    used, unused = make_feed(0), make_feed(0)
    for number in range(9):
        assert used.batch(number) == unused.batch(number)
        spares(used, number)
