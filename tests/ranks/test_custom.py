"""A rollout function of the user's: what it returns is trained on; ranks that call the engines unevenly are told."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import SamplingSpec
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.placement import Placement
from colocate_rl.rollout.collect import Rollout, RolloutSettings
from colocate_rl.rollout.custom import CustomRollout, FreeGenerator
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.rollout.sampler import PROMPT_INDEX
from tests.ranks.launch import Ranks, outcome
from tests.ranks.scripted import LARGEST_ID, ScriptedEngine, scripted_logprob
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

EOS, PAD = 256, 257
ROWS = [{PROMPT_INDEX: n // 3, "prompt": f"p{n // 3}", "answer": n} for n in range(12)]

Row = dict[str, Any]
Function = Callable[[list[Any], Any], Any]


@dataclass
class Trainer:
    """What a rollout function sees of the trainer."""

    free: FreeGenerator
    collectives: Collectives
    prepared: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Any], num_generations: int = 1, **sampling: Any) -> dict[str, list[Any]]:
        def prepare() -> None:
            self.prepared += 1

        return self.free(prompts, num_generations, sampling, prepare)


@dataclass(frozen=True)
class Result:
    batch: Any
    scored: Any
    stats: list[Any]
    seen: list[dict[str, Any]]
    asked: list[Any]


def collect(
    function: Function, parts: Sequence[Sequence[Row]], num_engines: int, seed: int | None = 3, **settings: Any
) -> Result:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=collectives.world_size, num_engines=num_engines, num_cores=8)
    shard = placement.shard_of(collectives.rank)
    engine = None if shard is None else ScriptedEngine(shard.engine)
    generator = Generator(placement, engine, collectives)
    codec = PromptCodec(tiny_tokenizer())
    sampling = SamplingSpec(9, stop_token_ids=(EOS,))
    free = FreeGenerator(codec, generator, collectives, sampling)
    trainer = Trainer(free, collectives)

    def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
        trainer.seen.append({name: value for name, value in others.items() if not name.startswith("log_")})
        return [float(len(ids)) for ids in completion_ids]

    rollout = Rollout(
        codec,
        generator,
        Rewards([reward]),
        collectives,
        RolloutSettings(sampling, PAD, **settings),
        PhaseClock(lambda: None),
        replacement=CustomRollout(
            function, trainer, free, collectives, end_token_ids=(EOS,), vocab_size=LARGEST_ID, window=40
        ),
    )
    rows = parts[collectives.rank]
    scored, batch, stats = rollout.collect(rows, MetricBuffer(), trainer_state="state", seed=seed, policy_version=4)
    asked = [] if engine is None else [(call.sampling, call.requests) for call in engine.calls]
    return Result(batch, scored, stats, trainer.seen, asked)


def cut(*sizes: int) -> list[list[Row]]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [ROWS[start : start + size] for start, size in zip(starts, sizes, strict=True)]


# What it returns


def by_hand(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Nothing of the engines: ids by place, an environment's answer in the middle, and fields for the reward."""
    draws = [random.Random(f"{prompt} {place}") for place, prompt in enumerate(prompts)]
    lengths = [draw.randrange(3, 8) for draw in draws]
    ids = [[draw.randrange(250) for _ in range(length)] for draw, length in zip(draws, lengths, strict=True)]
    ids = [[*row, EOS] if place % 2 else row for place, row in enumerate(ids)]
    return {
        "prompt_ids": [list(tiny_tokenizer()(f"{prompt}!")["input_ids"]) for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[-(token + 1) / 64 for token in row] for row in ids],
        "env_mask": [[0 if place == 1 else 1 for place in range(len(row))] for row in ids],
        "won": [place % 3 for place in range(len(prompts))],
        "game": "chess",
    }


@pytest.mark.parametrize("pass_columns", [True, False])
@pytest.mark.parametrize("sizes", [(12,), (5, 7), (0, 4, 8)], ids=str)
def test_what_it_returns_is_scored_and_trained_on(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...], pass_columns: bool
) -> None:
    parts = cut(*sizes)
    results: list[Result] = ranks(len(sizes)).run(collect_by_hand, parts, pass_columns)
    for result, rows in zip(results, parts, strict=True):
        wanted = by_hand([row["prompt"] for row in rows], None)
        assert result.batch.num_rows == len(rows)
        for place in range(len(rows)):
            prompt, ids, mask = (wanted[name][place] for name in ("prompt_ids", "completion_ids", "env_mask"))
            own = result.batch.attention_mask[place]
            assert result.batch.input_ids[place][own].tolist() == prompt + ids
            assert result.batch.loss_mask[place][own].int().tolist() == [0] * len(prompt) + mask
            logprobs = [v * m for v, m in zip(wanted["logprobs"][place], mask, strict=True)]
            assert result.batch.sampling_logprobs[place][own].tolist() == [0.0] * len(prompt) + logprobs
            completion = result.scored.completions[place]
            assert completion.finish_reason == ("stop" if ids[-1] == EOS else "length")
            assert completion.policy_version == 4
        if rows:
            (seen,) = result.seen
            assert seen.pop("completions") == [
                tiny_tokenizer().decode([t for t in ids if t != EOS]) for ids in wanted["completion_ids"]
            ]
            own_columns = {"answer": [row["answer"] for row in rows]} if pass_columns else {}
            assert seen == {
                "prompts": [row["prompt"] for row in rows],
                "trainer_state": "state",
                "won": wanted["won"],
                "game": ["chess"] * len(rows),
                **own_columns,
            }


def collect_by_hand(parts: Sequence[Sequence[Row]], pass_columns: bool) -> Result:
    return collect(by_hand, parts, 1, pass_columns=pass_columns)


# The way to the engines


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Goes on behind the first completions; ranks have differently many rows."""
    first = trainer.generate(prompts)
    onward = [p + c for p, c in zip(first["prompt_ids"], first["completion_ids"], strict=True)]
    long = [place for place, ids in enumerate(onward) if len(ids) > 6]
    second = trainer.generate([onward[place] for place in long], max_tokens=2, temperature=0.5)
    for place, ids, logprobs in zip(long, second["completion_ids"], second["logprobs"], strict=True):
        first["completion_ids"][place] += ids
        first["logprobs"][place] += logprobs
    return {**first, "long": [place in long for place in range(len(prompts))]}


def collect_two_turns(parts: Sequence[Sequence[Row]], num_engines: int) -> Result:
    return collect(two_turns, parts, num_engines)


@pytest.mark.parametrize(("sizes", "num_engines"), [((5, 7), 2), ((0, 12), 1), ((3, 0, 9), 2)], ids=str)
def test_the_engines_answer_as_they_would_one_rank(
    ranks: Callable[[int], Ranks], sizes: tuple[int, ...], num_engines: int
) -> None:
    (alone,) = ranks(1).run(collect_two_turns, [ROWS], 1)
    results: list[Result] = ranks(len(sizes)).run(collect_two_turns, cut(*sizes), num_engines)
    completions = [c for result in results for c in result.scored.completions]
    assert completions == alone.scored.completions
    assert len({tuple(c.token_ids) for c in completions}) > 6, "copies of a prompt differ"
    asked = [call for result in results for call in result.asked]
    assert {sampling.max_tokens for sampling, _ in asked} == {9, 2}
    assert {sampling.temperature for sampling, _ in asked} == {1.0, 0.5}
    num_long = sum(sum(seen["long"]) for seen in alone.seen)
    assert 0 < num_long < 12
    for result in results:
        assert sum(stat.num_prompts for stat in result.stats) == 12 + num_long
        for completion in result.scored.completions:
            for token, logprob in list(zip(completion.token_ids, completion.sampling_logprobs, strict=True))[:1]:
                assert logprob == scripted_logprob(token, 0)


# Failing


def raising(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    if trainer.collectives.rank == 1:
        raise ZeroDivisionError("told to fail")
    return trainer.generate(prompts)


def once_more(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    if trainer.collectives.rank == 1:
        trainer.generate(prompts)
    return trainer.generate(prompts)


def otherwise(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return trainer.generate(prompts, temperature=1.0 + trainer.collectives.rank)


def unknown(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return trainer.generate(prompts, **({"temprature": 1.0} if trainer.collectives.rank == 1 else {}))


def bad_prompt(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return trainer.generate([*prompts[:-1], 5] if trainer.collectives.rank == 1 else prompts)


FAILURES: dict[Function, tuple[list[str], str]] = {
    raising: (["PeerError", "ZeroDivisionError", "PeerError"], "told to fail"),
    once_more: (["RolloutError", "PeerError", "PeerError"], "rank 0 is about to return from rollout_func while rank 1"),
    otherwise: (["RolloutError", "PeerError", "PeerError"], "temperature=2.0"),
    unknown: (["PeerError", "ConfigError", "PeerError"], "unknown argument(s) temprature"),
    bad_prompt: (["PeerError", "DataError", "PeerError"], "got int"),
}


def collect_failing(function: Function, parts: Sequence[Sequence[Row]]) -> tuple[Any, int]:
    """A rollout that fails, then one that does not, with the same ranks."""
    raised = outcome(collect, function, parts, 1)
    return raised, collect(two_turns, parts, 1).batch.num_rows


@pytest.mark.parametrize("function", FAILURES, ids=lambda function: function.__name__)
def test_ranks_that_part_ways_end_together(ranks: Callable[[int], Ranks], function: Function) -> None:
    results = ranks(3).run(collect_failing, function, cut(4, 5, 3))
    kinds, words = FAILURES[function]
    assert [raised.kind for raised, _ in results] == kinds
    assert words in next(raised.message for raised, _ in results if raised.kind != "PeerError")
    assert all(raised.seconds < 10 for raised, _ in results)
    assert [rows for _, rows in results] == [4, 5, 3]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"completion_ids": None}, r"must return keys \['completion_ids'\]"),
    "no log-probabilities": ({"logprobs": None}, r"must return keys \['logprobs'\]"),
    "a row too few": ({"completion_ids": [[1]]}, "returned 1 completion_ids for 12 prompts"),
    "log-probabilities too few": ({"logprobs": [[-1.0]] * 12}, "1 logprobs and"),
    "mask too short": ({"env_mask": [[1]] * 12}, "and 1 env_mask"),
    "no prompt": ({"prompt_ids": [[]] * 12}, "prompt_ids is empty"),
    "an id too large": ({"prompt_ids": [[LARGEST_ID]] * 12}, f"the model has {LARGEST_ID} embeddings"),
    "too long": ({"prompt_ids": [[1] * 60] * 12}, "the context window holds 40"),
    "extra too short": ({"won": [1]}, r"returned 1 value\(s\) under 'won' for 12"),
    "extra of a taken name": ({"completions": ["x"] * 12}, "'completions', which reward functions get anyway"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_rollout_is_refused(name: str) -> None:
    changes, words = WRONG[name]
    raised = outcome(collect, lambda prompts, trainer: {**by_hand(prompts, trainer), **changes}, [ROWS], 1)
    assert raised.kind == "RolloutError"
    assert re.search(words, raised.message), raised.message


def test_what_is_no_dictionary_is_refused() -> None:
    raised = outcome(collect, lambda prompts, trainer: None, [ROWS], 1)
    assert raised.kind == "RolloutError"
    assert "it returned NoneType" in raised.message
