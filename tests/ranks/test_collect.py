"""A rollout over several ranks scores and compares as one process with all rows would."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.placement import Placement
from colocate_rl.rollout.collect import Rollout, RolloutSettings
from colocate_rl.rollout.generate import Generator, request_seed
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Scored
from tests.ranks.launch import Ranks, outcome
from tests.ranks.scripted import Fault, ScriptedEngine, scripted_completion, seed_source
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

SEED = 77
PAD = 257
WEIGHTS = (1.0, 0.5)

Row = dict[str, Any]

tokenizer = functools.cache(tiny_tokenizer)


def make_rows(indices: Iterable[int]) -> list[Row]:
    """Rows whose extra columns tell them apart, also within a group and where two prompts have the same text."""
    return [
        {
            PROMPT_INDEX: index,
            "prompt": "ab" * (index % 3 + 1),
            "answer": 10 * index,
            "tag": [f"row {number}", {"n": number}],
        }
        for number, index in enumerate(indices)
    ]


GROUP = 4
INDICES = [index for index in (5, 2, 8, 11, 3, 14) for _ in range(GROUP)]
"""2, 5, 8, 11 and 14 have the same text."""
ROWS = make_rows(INDICES)
SPLITS: dict[str, tuple[int, ...]] = {
    "even": (8, 8, 8),
    "groups on two ranks": (7, 10, 7),
    "a group on all ranks": (9, 2, 13),
    "the first rank empty": (0, 17, 7),
    "two ranks empty": (0, 0, 24),
    "a rank with one row": (1, 0, 23),
    "two ranks, uneven": (5, 19),
    "two ranks, one empty": (24, 0),
}


def cut(rows: Sequence[Row], sizes: Sequence[int]) -> list[list[Row]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(rows[start : start + size]))
        start += size
    assert start == len(rows)
    return parts


def by_tokens(completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    """Depends on the ids and on a column of the same row."""
    return [sum(ids) % 97 / 10 - number / 100 for ids, number in zip(completion_ids, answer, strict=True)]


def by_length(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None for the completions without tokens."""
    return [float(len(ids)) if ids else None for _, ids in zip(completions, completion_ids, strict=True)]


@dataclass(frozen=True, slots=True)
class Seen:
    """The keyword arguments of one call of a reward function."""

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collected:
    scored: Scored
    batch: RolloutBatch
    seen: list[Seen]
    figures: dict[str, float | None]


def make_rollout(
    num_engines: int, functions: Sequence[Any], scale: str = "group", fault: Fault | None = None, **settings: Any
) -> Rollout:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=collectives.world_size, num_engines=num_engines, num_cores=64)
    shard = placement.shard_of(collectives.rank)
    engine = None if shard is None else ScriptedEngine(shard.engine, fault=fault)
    return Rollout(
        PromptCodec(tokenizer()),
        Generator(placement, engine, collectives),
        Rewards(functions, WEIGHTS[: len(functions)]),
        collectives,
        RolloutSettings(SamplingSpec(max_tokens=9), PAD, scale_rewards=scale, **settings),
        PhaseClock(lambda: None),
    )


def collect_on_rank(parts: Sequence[Sequence[Row]], num_engines: int, scale: str, mask_truncated: bool) -> Collected:
    seen: list[Seen] = []

    def remembered(**arguments: Any) -> list[float]:
        arguments["log_extra"]("seen tag", [tag[0] for tag in arguments["tag"]])
        arguments["log_metric"](f"only rank {collectives.rank}", float(len(arguments["prompts"])))
        seen.append(Seen({name: value for name, value in arguments.items() if not name.startswith("log_")}))
        return by_tokens(**arguments)

    collectives = Collectives(torch.device("cpu"))
    rollout = make_rollout(num_engines, [remembered, by_length], scale, mask_truncated_completions=mask_truncated)
    metrics = MetricBuffer()
    scored, batch, _ = rollout.collect(parts[collectives.rank], metrics, trainer_state="the state", seed=SEED)
    return Collected(scored, batch, seen, metrics.flush(collectives))


def expected_completions(rows: Sequence[Row]) -> list[Completion]:
    """Each row's completion: by its prompt, its index and its number within the group."""
    copies: dict[int, int] = {}
    completions = []
    for row in rows:
        index = row[PROMPT_INDEX]
        prompt = tuple(tokenizer()(row["prompt"])["input_ids"])
        copy = copies.get(index, 0)
        copies[index] = copy + 1
        completions.append(scripted_completion(prompt, seed_source(request_seed(SEED, index) + copy)))
    return completions


def expected_advantages(rows: Sequence[Row], completions: Sequence[Completion], scale: str) -> list[float]:
    """In plain Python and without groups as rows of a table."""
    rewards = [
        sum(completion.token_ids) % 97 / 10
        - row["answer"] / 100
        + (WEIGHTS[1] * len(completion.token_ids) if completion.token_ids else 0)
        for row, completion in zip(rows, completions, strict=True)
    ]
    advantages = []
    for row, reward in zip(rows, rewards, strict=True):
        group = [other for peer, other in zip(rows, rewards, strict=True) if peer[PROMPT_INDEX] == row[PROMPT_INDEX]]
        divisor = {"group": statistics.stdev(group), "batch": statistics.stdev(rewards), "none": 1 - 1e-4}[scale] + 1e-4
        advantages.append((reward - statistics.fmean(group)) / divisor)
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_ranks_compare_as_one_process_would(ranks: Callable[[int], Ranks], sizes: tuple[int, ...], scale: str) -> None:
    parts = cut(ROWS, sizes)
    results: list[Collected] = ranks(len(sizes)).run(collect_on_rank, parts, 2, scale, False)
    completions = expected_completions(ROWS)
    assert [c for result in results for c in result.scored.completions] == completions
    advantages = torch.cat([result.scored.advantages for result in results])
    alone = collect_on_rank([ROWS], 1, scale, False)
    assert torch.equal(advantages, alone.scored.advantages)
    torch.testing.assert_close(
        advantages, torch.tensor(expected_advantages(ROWS, completions, scale)), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(torch.cat([result.batch.advantages for result in results]), advantages)
    assert advantages.abs().min() > 0.01, "rows without a difference show nothing"


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_rewards_see_rows_with_their_columns(ranks: Callable[[int], Ranks], sizes: tuple[int, ...]) -> None:
    parts = cut(ROWS, sizes)
    results: list[Collected] = ranks(len(sizes)).run(collect_on_rank, parts, 2, "group", False)
    completions = iter(expected_completions(ROWS))
    for result, rows in zip(results, parts, strict=True):
        mine = [next(completions) for _ in rows]
        assert result.scored.rows == rows
        if not rows:
            assert result.seen == []
            assert result.scored.rewards.shape == (0, 2)
            continue
        (call,) = result.seen
        assert call.arguments == {
            "prompts": [row["prompt"] for row in rows],
            "completions": result.scored.texts,
            "completion_ids": [list(completion.token_ids) for completion in mine],
            "answer": [row["answer"] for row in rows],
            "tag": [row["tag"] for row in rows],
            "trainer_state": "the state",
        }
        assert result.scored.extras == {"seen tag": [row["tag"][0] for row in rows]}
        lengths = [float(len(completion.token_ids)) for completion in mine]
        wanted = [
            [*by_tokens([list(c.token_ids)], [row["answer"]]), n] for c, row, n in zip(mine, rows, lengths, strict=True)
        ]
        for got, (tokens, length) in zip(result.scored.rewards.tolist(), wanted, strict=True):
            assert got[0] == pytest.approx(tokens, abs=1e-5)
            assert got[1] == length or (math.isnan(got[1]) and length == 0)


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("sizes", [(7, 10, 7), (0, 17, 7)], ids=["uneven", "one empty"])
def test_the_batch_holds_the_engines_ids_bit_for_bit(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...], mask_truncated: bool
) -> None:
    parts = cut(ROWS, sizes)
    results: list[Collected] = ranks(3).run(collect_on_rank, parts, 2, "group", mask_truncated)
    completions = iter(expected_completions(ROWS))
    beyond, empty, truncated = 0, 0, 0
    for result, rows in zip(results, parts, strict=True):
        batch = result.batch
        assert batch.num_rows == len(rows)
        for number, row in enumerate(rows):
            completion = next(completions)
            prompt = tokenizer()(row["prompt"])["input_ids"]
            assert batch.input_ids[number][batch.attention_mask[number]].tolist() == [*prompt, *completion.token_ids]
            assert batch.input_ids[number][batch.completion_mask[number]].tolist() == list(completion.token_ids)
            values = batch.sampling_logprobs[number][batch.completion_mask[number]]
            assert values.tolist() == list(completion.sampling_logprobs)
            assert batch.sampling_logprobs[number][~batch.completion_mask[number]].abs().sum() == 0
            left_out = mask_truncated and completion.finish_reason != "stop"
            assert batch.loss_mask[number].sum() == (0 if left_out else len(completion.token_ids))
            beyond += any(token >= len(tokenizer()) for token in completion.token_ids)
            empty += not completion.token_ids
            truncated += completion.finish_reason != "stop"
    assert min(beyond, empty, truncated) > 0, "the script should hold all three kinds"


def test_figures_are_those_of_all_rows(ranks: Callable[[int], Ranks]) -> None:
    results: list[Collected] = ranks(3).run(collect_on_rank, cut(ROWS, (7, 0, 17)), 2, "group", False)
    completions = expected_completions(ROWS)
    lengths = [len(completion.token_ids) for completion in completions]
    ended = [len(completion.token_ids) for completion in completions if completion.finish_reason == "stop"]
    tokens = [by_tokens([list(c.token_ids)], [row["answer"]])[0] for c, row in zip(completions, ROWS, strict=True)]
    known = [length for length in lengths if length]
    expected = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/mean_terminated_length": statistics.fmean(ended),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "rewards/remembered/mean": statistics.fmean(tokens),
        "rewards/remembered/std": statistics.stdev(tokens),
        "rewards/by_length/mean": statistics.fmean(known),
        "only rank 0": 7.0,
        "only rank 2": 17.0,
    }
    for result in results:
        assert result.figures == results[0].figures
        for name, value in expected.items():
            assert result.figures[name] == pytest.approx(value, abs=1e-5), name


# Failing


def failing_rewards(kinds: dict[int, str], rank: int) -> Callable[..., Any]:
    def reward(prompts: list[str], **_: Any) -> Any:
        kind = kinds.get(rank, "good")
        if kind == "raise":
            raise ZeroDivisionError(f"told to fail on rank {rank}")
        values = [1.0] * len(prompts)
        return {
            "good": values,
            "one short": values[:-1],
            "one more": [*values, 1.0],
            "one for all": [1.0],
            "none": None,
            "column": torch.ones(len(prompts), 1),
            "nan": [*values[:-1], math.nan],
        }[kind]

    return reward


def collect_failing(parts: Sequence[Sequence[Row]], kinds: dict[int, str]) -> tuple[Any, int]:
    """A rollout that fails, then one that does not, with the same group."""
    collectives = Collectives(torch.device("cpu"))
    rows = parts[collectives.rank]
    rollout = make_rollout(1, [failing_rewards(kinds, collectives.rank)])
    raised = outcome(lambda: rollout.collect(rows, MetricBuffer(), trainer_state=None, seed=None))
    good = make_rollout(1, [by_length])
    scored, _, _ = good.collect(rows, MetricBuffer(), trainer_state=None, seed=None)
    return raised, len(scored.completions)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 16, 0)], ids=["even", "one empty"])
def test_a_reward_that_raises_on_one_rank_ends_all(ranks: Callable[[int], Ranks], sizes: tuple[int, ...]) -> None:
    results = ranks(3).run(collect_failing, cut(ROWS, sizes), {1: "raise"})
    kinds, messages = [raised.kind for raised, _ in results], [raised.message for raised, _ in results]
    assert kinds == ["PeerError", "ZeroDivisionError", "PeerError"]
    assert messages[1] == "told to fail on rank 1"
    for rank in (0, 2):
        assert f"rank {rank} stops because rank 1 failed while scoring completions" in messages[rank]
        assert "ZeroDivisionError" in messages[rank]
    assert all(raised.seconds < 10 for raised, _ in results)
    assert [count for _, count in results] == list(sizes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one short", "returned 7 value(s) for 8 completions"),
        ("one more", "returned 9 value(s) for 8 completions"),
        ("one for all", "returned 1 value(s) for 8 completions"),
        ("none", "returned NoneType"),
        ("column", "returned [1.0] for row 0"),
        ("nan", "returned nan for row 7"),
    ],
)
def test_a_reward_of_the_wrong_shape_on_one_rank_ends_all(ranks: Callable[[int], Ranks], kind: str, words: str) -> None:
    results = ranks(3).run(collect_failing, cut(ROWS, (8, 8, 8)), {2: kind})
    assert [raised.kind for raised, _ in results] == ["PeerError", "PeerError", "RewardError"]
    assert f"'reward' {words}" in results[2][0].message


def test_when_all_ranks_fail_one_shows_the_cause(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(collect_failing, cut(ROWS, (8, 8, 8)), dict.fromkeys(range(3), "raise"))
    assert [raised.kind for raised, _ in results] == ["ZeroDivisionError", "PeerError", "PeerError"]
    assert [count for _, count in results] == [8, 8, 8]


def collect_bad_prompt(parts: Sequence[Sequence[Row]]) -> Any:
    rank = Collectives(torch.device("cpu")).rank
    return outcome(
        lambda: make_rollout(1, [by_length]).collect(parts[rank], MetricBuffer(), trainer_state=None, seed=None)
    )


@pytest.mark.parametrize("prompt", [5, "", [{"role": "user", "content": "x"}]], ids=["number", "empty", "no template"])
def test_a_prompt_that_cannot_be_encoded_ends_all(ranks: Callable[[int], Ranks], prompt: Any) -> None:
    rows = [dict(row) for row in ROWS]
    rows[20]["prompt"] = prompt
    results = ranks(3).run(collect_bad_prompt, cut(rows, (8, 8, 8)))
    assert [raised.kind for raised in results] == ["PeerError", "PeerError", "DataError"]


def collect_engine_failure(parts: Sequence[Sequence[Row]]) -> Any:
    rank = Collectives(torch.device("cpu")).rank
    rollout = make_rollout(2, [by_length], fault="raise" if rank == 1 else None)
    return outcome(lambda: rollout.collect(parts[rank], MetricBuffer(), trainer_state=None, seed=None))


def test_an_engine_failure_reaches_the_caller_of_collect(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(collect_engine_failure, cut(ROWS, (8, 8, 8)))
    assert [raised.kind for raised in results] == ["PeerError", "RuntimeError", "PeerError"]
