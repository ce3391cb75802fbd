"""Dynamic sampling and reward workers over several ranks and engines do what one process with all rows would."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.collect import Rollout
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.resample import Resampler
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Row, Scored
from colocate_rl.scoring.contract import RewardOptions
from tests.ranks.launch import Ranks
from tests.ranks.test_collect import ROWS, SEED, SPLITS, by_tokens, cut, make_rollout, make_rows
from tests.unit import reward_functions

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]

SPARES = range(20, 60)
MAX_TRIES = 4


def flat_for_some(completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    """The same for all completions of every prompt but those that leave a rest of 2 divided by 3."""
    values = by_tokens(completion_ids, answer)
    return [value if number // 10 % 3 == 2 else 1.0 for value, number in zip(values, answer, strict=True)]


def nothing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@dataclass(frozen=True, slots=True)
class Refilled:
    scored: Scored
    batch: RolloutBatch
    dropped: list[list[int]]
    asked: list[list[int]]
    figures: dict[str, float | None]


def refill_on_rank(
    parts: Sequence[Sequence[Row]], num_engines: int, max_tries: int, deal_rows: bool = False
) -> Refilled:
    collectives, metrics = Collectives(torch.device("cpu")), MetricBuffer()
    rollout = make_rollout(num_engines, [flat_for_some, nothing], deal_rows=deal_rows)
    asked: list[list[int]] = []
    sample = partial(rollout.sample, metrics=metrics, trainer_state=None, seed=SEED)

    def ask(rows: Sequence[Row]) -> Any:
        asked.append([row[PROMPT_INDEX] for row in rows])
        return sample(rows)

    rated = sample(parts[collectives.rank])
    resampler = Resampler(collectives, rollout.rewards.weights, max_tries)
    rated, dropped = resampler.refill(rated, make_rows(SPARES), ask, metrics)
    scored, batch = rollout.finish(rated, metrics, to_train=True)
    assert deal_rows or torch.equal(batch.advantages, scored.advantages)
    gone = [[row[PROMPT_INDEX] for row in part.answered.rows] for part in dropped]
    return Refilled(scored, batch, gone, asked, metrics.flush(collectives))


def indices(rows: Iterable[Row]) -> list[int]:
    return [row[PROMPT_INDEX] for row in rows]


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_ranks_replace_the_same_groups_as_one_process_would(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...]
) -> None:
    results: list[Refilled] = ranks(len(sizes)).run(refill_on_rank, cut(ROWS, sizes), 2, MAX_TRIES)
    alone = refill_on_rank([ROWS], 1, MAX_TRIES)
    assert [len(result.scored.rows) for result in results] == list(sizes), "rows stay on their ranks"
    whole = [row for result in results for row in result.scored.rows]
    # 5, 2, 8, 11, 3, 14: only 3 is flat, and so are the spares 21, 22 and so on until 20 comes first
    assert indices(whole) == indices(alone.scored.rows) == [i for i in (5, 2, 8, 11, 20, 14) for _ in range(4)]
    assert [c for result in results for c in result.scored.completions] == alone.scored.completions
    assert torch.equal(torch.cat([r.scored.advantages for r in results]), alone.scored.advantages)
    for name in ("dynamic_sampling/tries", "dynamic_sampling/prompts", "frac_reward_zero_std", "reward", "reward_std"):
        assert all(result.figures[name] == alone.figures[name] for result in results), name
    assert alone.figures["dynamic_sampling/frac_reward_zero_std"] == pytest.approx(1 / 6)
    assert alone.figures["frac_reward_zero_std"] == 0


def trained(batch: RolloutBatch) -> list[tuple[list[int], list[int], float]]:
    """Prompt and completion ids and advantage of each row."""
    rows = []
    for ids, mask, completion, advantage in zip(
        batch.input_ids, batch.attention_mask, batch.completion_mask, batch.advantages.tolist(), strict=True
    ):
        prompt = mask.bool() & ~completion.bool()
        rows.append((ids[prompt].tolist(), ids[completion.bool()].tolist(), advantage))
    return rows


def test_what_replaced_groups_is_dealt_to_the_ranks_like_the_rest(ranks: Callable[[int], Ranks]) -> None:
    results: list[Refilled] = ranks(3).run(refill_on_rank, cut(ROWS, (8, 8, 8)), 2, MAX_TRIES, True)
    expected = [row for result in results for row in as_asked(result.scored)]
    assert sorted(row for result in results for row in trained(result.batch)) == sorted(expected)
    assert [result.batch.num_rows for result in results] == [8, 8, 8]
    assert results[0].figures["balance/rank_tokens"] <= results[0].figures["balance/rank_tokens_before"]
    assert any(trained(result.batch) != as_asked(result.scored) for result in results), "rows have moved"


def as_asked(scored: Scored) -> list[tuple[list[int], list[int], float]]:
    return [
        (list(ids), list(completion.token_ids), advantage)
        for ids, completion, advantage in zip(
            scored.prompt_ids, scored.completions, scored.advantages.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("max_tries", [1, 2])
def test_several_tries_over_ranks_and_the_last_groups_are_kept(ranks: Callable[[int], Ranks], max_tries: int) -> None:
    rows = make_rows([index for index in (3, 5, 6, 9) for _ in range(4)])
    results: list[Refilled] = ranks(3).run(refill_on_rank, cut(rows, (5, 0, 11)), 2, max_tries)
    # tries: 3, 6, 9 become 20, 21, 22; then 21, 22 become 23, 24
    expected = [(20, 5, 21, 22), (20, 5, 23, 24)][max_tries - 1]
    whole = [row for result in results for row in result.scored.rows]
    assert indices(whole) == [index for index in expected for _ in range(4)]
    assert [result.asked[0] for result in results] == [[20] * 4, [], [21] * 4 + [22] * 4]
    assert [result.dropped[0] for result in results] == [[3] * 4, [], [6] * 4 + [9] * 4]
    left = {1: 2 / 4, 2: 1 / 4}[max_tries]  # 23 has a spread, 24 has none
    assert all(result.figures["frac_reward_zero_std"] == left for result in results)
    for result in results:
        for row, completion, rewards in zip(
            result.scored.rows, result.scored.completions, result.scored.rewards.tolist(), strict=True
        ):
            (reward,) = flat_for_some([list(completion.token_ids)], [row["answer"]])
            assert rewards[0] == pytest.approx(reward)


# Workers


def collect_with_workers(parts: Sequence[Sequence[Row]], num_workers: int) -> tuple[Scored, list[int]]:
    rank = Collectives(torch.device("cpu")).rank
    rollout: Rollout = make_rollout(2, [by_tokens])
    rollout.rewards = Rewards(
        [reward_functions.by_ids, reward_functions.calls],
        options=RewardOptions(num_workers=num_workers),
    )
    rollout.rewards.prepare(torch.device("cpu"))
    try:
        scored, _, _ = rollout.collect(
            parts[rank], MetricBuffer(), trainer_state=SimpleNamespace(global_step=3), seed=SEED
        )
    finally:
        rollout.rewards.close()
    return scored, scored.extras.get("pid", [])


@pytest.mark.parametrize("sizes", [(7, 10, 7), (0, 17, 7)], ids=["groups on two ranks", "one rank empty"])
def test_workers_give_each_row_its_own_reward(ranks: Callable[[int], Ranks], sizes: tuple[int, ...]) -> None:
    results: list[tuple[Scored, list[int]]] = ranks(3).run(collect_with_workers, cut(ROWS, sizes), 1)
    for scored, pids in results:
        answers = [row["answer"] for row in scored.rows]
        expected = by_tokens([list(c.token_ids) for c in scored.completions], answers)
        assert scored.rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        numbers = indices(scored.rows)
        assert scored.rewards[:, 1].tolist() == [numbers.count(index) for index in numbers], "a call is a prompt's rows"
        assert len(pids) == len(scored.rows)
    assert len({pid for _, pids in results for pid in pids}) == sum(size > 0 for size in sizes), "workers of its own"
