"""Every row gets its own completion, whatever the numbers of ranks, engines and prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, SamplingSpec
from colocate_rl.placement import Placement
from colocate_rl.rollout.generate import Generator, request_seed
from colocate_rl.rollout.records import EngineStats, Prompt
from tests.ranks.launch import Raised, Ranks, outcome
from tests.ranks.scripted import Call, Fault, ScriptedEngine, scripted_completion, seed_source

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

SAMPLING = SamplingSpec(max_tokens=9)
SEED = 20_260_101

Batches = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank its prompts as (index, copies)."""

CASES: dict[str, Batches] = {
    "3, 1 and 2 prompts": (((4, 2), (9, 1), (2, 3)), ((7, 2),), ((1, 1), (3, 2))),
    "0, 4 and 1 prompts": ((), ((5, 1), (6, 2), (8, 1), (10, 3)), ((11, 2),)),
    "0, 0 and 1 prompts": ((), (), ((3, 4),)),
    "one prompt, fewer copies than engines": (((6, 2),), (), ()),
    "two prompts, copies spread": (((6, 5),), (), ((7, 2),)),
    "same text, different indices": (((1, 2), (101, 2)), ((201, 2), (301, 1)), ((401, 3),)),
    "groups on several ranks": (((5, 2), (6, 1)), ((6, 3), (7, 2)), ((7, 1), (5, 1), (8, 2))),
    "one group on all ranks": (((5, 2),), ((5, 1),), ((5, 3),)),
    "an empty prompt": (((20, 2), (3, 1)), ((40, 1),), ((60, 2),)),
    "many prompts": (
        tuple((index, 2) for index in range(0, 11)),
        tuple((index, 2) for index in range(11, 13)),
        tuple((index, 1) for index in range(13, 20)),
    ),
    "nothing": ((), (), ()),
}
WORLDS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (3, 2, 1), (3, 3, 1), (3, 1, 2)]
"""World size, engines, shards of each."""

every_case = pytest.mark.parametrize("batches", CASES.values(), ids=CASES)
every_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: "W{}-K{}-t{}".format(*world))


def prompt_ids(index: int) -> tuple[int, ...]:
    """Ids of very different lengths, some none; indices that differ by 100 have the same."""
    number = index % 100
    return tuple(number * 1000 + place for place in range(number % 20))


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank saw."""

    rows: list[list[Completion]]
    stats: list[EngineStats]
    calls: list[Call]


def generate_on_rank(
    world: tuple[int, int, int],
    batches: Batches,
    seed: int | None = None,
    faults: dict[int, Fault] | None = None,
    rounds: int = 1,
) -> Report:
    """Generates with engine e's shard j numbered 100 * j + e; the report is of the last of several rounds."""
    collectives = Collectives(torch.device("cpu"))
    world_size, num_engines, num_shards = world
    placement = Placement.on_cpu(
        num_ranks=world_size, num_engines=num_engines, num_cores=64, tensor_parallel_size=num_shards
    )
    shard = placement.shard_of(collectives.rank)
    engine = None
    if shard is not None:
        engine = ScriptedEngine(100 * shard.index + shard.engine, fault=(faults or {}).get(collectives.rank))
    generator = Generator(placement, engine, collectives)
    prompts = [Prompt(index, prompt_ids(index), copies) for index, copies in batches[collectives.rank]]
    for _ in range(rounds):
        rows, stats = generator.generate(prompts, SAMPLING, seed)
    return Report(rows, stats, engine.calls if engine is not None else [])


def run(
    ranks: Callable[[int], Ranks], world: tuple[int, int, int], batches: Batches, *rest: object
) -> tuple[list[Report], Batches]:
    """The reports of all ranks, and the batches cut to the world's size; a world of one needs no process."""
    batches = batches[: world[0]]
    if world[0] == 1:
        return [generate_on_rank(world, batches, *rest)], batches  # type: ignore[arg-type]
    return ranks(world[0]).run(generate_on_rank, world, batches, *rest), batches


def merged(batches: Batches) -> dict[int, int]:
    """Copies wanted of each index by all ranks together, indices in order of appearance."""
    total: dict[int, int] = {}
    for batch in batches:
        for index, copies in batch:
            total[index] = total.get(index, 0) + copies
    return total


def rows_of(batches: Batches, answers: dict[tuple[int, int], Completion]) -> list[list[list[Completion]]]:
    """The rows of every rank, when copies of an index are dealt out in rank order."""
    dealt: Counter[int] = Counter()
    rows = []
    for batch in batches:
        mine = []
        for index, copies in batch:
            mine.append([answers[index, dealt[index] + copy] for copy in range(copies)])
            dealt[index] += copies
        rows.append(mine)
    return rows


def leaders(reports: Sequence[Report], world: tuple[int, int, int]) -> list[Report]:
    """The reports of the ranks with each engine's first shard."""
    return [reports[engine * world[2]] for engine in range(world[1])]


@every_case
@every_world
def test_without_a_seed_each_row_has_its_own_answer(
    ranks: Callable[[int], Ranks], world: tuple[int, int, int], batches: Batches
) -> None:
    reports, batches = run(ranks, world, batches)
    wanted = [(index, copy) for index, copies in merged(batches).items() for copy in range(copies)]
    given = [
        (request.token_ids, completion)
        for report in leaders(reports, world)
        for call in report.calls
        for request, answer in zip(call.requests, call.answers, strict=True)
        for completion in answer
    ]
    # Each copy of each prompt was asked for exactly once, and each completion that an engine gave is one row's.
    got = [
        (prompt_ids(index), completion)
        for report, batch in zip(reports, batches, strict=True)
        for (index, copies), row in zip(batch, report.rows, strict=True)
        for completion in row
        if len(row) == copies
    ]
    assert len(got) == len(wanted)
    assert sorted(got, key=repr) == sorted(given, key=repr)
    answers = dict(enumerate(completion for _, completion in given))
    longer = [tuple(completion.token_ids) for completion in answers.values() if len(completion.token_ids) > 1]
    assert len(set(longer)) == len(longer), "two rows have the same sample"


@every_case
@every_world
def test_with_a_seed_completions_depend_on_index_and_copy_alone(
    ranks: Callable[[int], Ranks], world: tuple[int, int, int], batches: Batches
) -> None:
    reports, batches = run(ranks, world, batches, SEED)
    answers = {
        (index, copy): scripted_completion(prompt_ids(index), seed_source(request_seed(SEED, index) + copy))
        for index, copies in merged(batches).items()
        for copy in range(copies)
    }
    # No engine, no world size in the expected value: it is the same for every K.
    assert [report.rows for report in reports] == rows_of(batches, answers)


@every_case
@every_world
def test_work_is_even_and_one_call_each(
    ranks: Callable[[int], Ranks], world: tuple[int, int, int], batches: Batches
) -> None:
    reports, batches = run(ranks, world, batches)
    copies = merged(batches)
    num_engines, num_shards = world[1:]
    hosts = range(num_engines * num_shards)
    for rank in hosts:
        assert len(reports[rank].calls) <= 1
        first_shard = reports[rank - rank % num_shards]
        assert [call.requests for call in reports[rank].calls] == [call.requests for call in first_shard.calls]
        assert all(call.requests and call.sampling == SAMPLING for call in reports[rank].calls)
    requests = [[request for call in report.calls for request in call.requests] for report in leaders(reports, world)]
    if len(copies) >= num_engines:
        sizes = [len(mine) for mine in requests]
        assert sum(sizes) == len(copies), "a whole group stays on one engine"
    else:
        sizes = [sum(request.num_completions for request in mine) for mine in requests]
        assert sum(sizes) == sum(copies.values())
    assert max(sizes) - min(sizes) <= 1
    for report in reports:
        assert [stat.engine for stat in report.stats] == list(range(num_engines))
        assert [stat.num_prompts for stat in report.stats] == [len(mine) for mine in requests]
        assert [stat.num_tokens for stat in report.stats] == [
            sum(len(completion.token_ids) for call in leader.calls for answer in call.answers for completion in answer)
            for leader in leaders(reports, world)
        ]
        assert all(stat.seconds > 0 for stat, mine in zip(report.stats, requests, strict=True) if mine)


@pytest.mark.parametrize("batches", [CASES["many prompts"], CASES["one group on all ranks"]], ids=["many", "one"])
def test_seeds_of_copies_never_repeat(ranks: Callable[[int], Ranks], batches: Batches) -> None:
    for seed in (SEED, SEED + 1):
        reports, _ = run(ranks, (3, 3, 1), batches, seed)
        requests = [request for report in reports for call in report.calls for request in call.requests]
        used = [
            request.seed + copy
            for request in requests
            if request.seed is not None
            for copy in range(request.num_completions)
        ]
        assert len(used) == len(set(used)) == sum(merged(batches).values())
    assert request_seed(SEED, 5) != request_seed(SEED + 1, 5)


def test_two_engines_give_different_samples_of_one_prompt(ranks: Callable[[int], Ranks]) -> None:
    reports, _ = run(ranks, (3, 2, 1), (((5, 32),), (), ()))
    assert all(request.seed is None for report in reports for call in report.calls for request in call.requests)
    samples = [
        {tuple(completion.token_ids) for answer in report.calls[0].answers for completion in answer} - {()}
        for report in reports[:2]
    ]
    assert all(samples)
    assert not samples[0] & samples[1]


def test_a_second_generation_samples_anew(ranks: Callable[[int], Ranks]) -> None:
    first, _ = run(ranks, (3, 2, 1), CASES["many prompts"])
    second, _ = run(ranks, (3, 2, 1), CASES["many prompts"], None, None, 2)
    assert [len(report.calls) for report in second] == [2, 2, 0]
    assert [report.calls[0] for report in second[:2]] == [report.calls[0] for report in first[:2]]
    assert second[0].rows != first[0].rows
    given = [completion for report in second[:2] for answer in report.calls[1].answers for completion in answer]
    got = [completion for report in second for row in report.rows for completion in row]
    assert sorted(got, key=repr) == sorted(given, key=repr)


def failing_on_rank(world: tuple[int, int, int], batches: Batches, faults: dict[int, Fault]) -> object:
    return outcome(generate_on_rank, world, batches, None, faults)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("raise", "RuntimeError", "engine 1 is told to fail"),
        ("lose a completion", "EngineError", "asked for 2 completions of a prompt and gave 1"),
        ("lose a prompt", "EngineError", "asked for 3 prompts and gave 2"),
        ("shorten log-probs", "EngineError", "3 token ids but 2 log-prob"),
    ],
)
def test_an_engine_that_fails_ends_all_ranks(
    ranks: Callable[[int], Ranks], fault: Fault, kind: str, words: str
) -> None:
    batches = (((1, 2), (2, 2), (3, 2)), ((4, 2), (5, 2)), ((6, 2),))
    results = ranks(3).run(failing_on_rank, (3, 2, 1), batches, {1: fault})
    assert [result.kind for result in results] == ["PeerError", kind, "PeerError"]
    assert words in results[1].message
    assert all("rank 1 failed while generating completions" in results[rank].message for rank in (0, 2))
    assert all(result.seconds < 10 for result in results)
    run(ranks, (3, 2, 1), batches)  # the group is still in step


def check_prompts_on_rank() -> object:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=3, num_engines=1, num_cores=64)
    engine = ScriptedEngine(0) if collectives.rank == 0 else None
    seen: list[tuple[int, str]] = []

    def refuse_long(length: int, where: str) -> None:
        seen.append((length, where))
        if length > 10:
            raise ValueError(f"{where} is too long: {length}")

    generator = Generator(placement, engine, collectives, refuse_long)
    prompts = [[Prompt(3, (1,) * 3, 1)], [Prompt(8, (1,) * 12, 1)], []][collectives.rank]
    raised = outcome(generator.generate, prompts, SAMPLING)
    return raised, seen, [] if engine is None else engine.calls


def test_a_refused_prompt_ends_all_ranks_before_any_engine_works(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(check_prompts_on_rank)
    assert [raised.kind for raised, _, _ in results] == ["ValueError", "PeerError", "PeerError"]
    assert "row 8 is too long: 12" in results[0][0].message
    for _, seen, calls in results:
        assert [length for length, _ in seen] == [3, 12]
        assert not calls


def disagree_on_rank() -> Raised:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=3, num_engines=1, num_cores=64)
    generator = Generator(placement, ScriptedEngine(0) if collectives.rank == 0 else None, collectives)
    raised: Raised = outcome(generator.generate, [Prompt(3, (1, 2, collectives.rank // 2), 1)], SAMPLING)
    return raised


def test_ranks_that_disagree_about_a_prompt_are_told(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(disagree_on_rank)
    assert [result.kind for result in results] == ["EngineError"] * 3
    assert all("disagree about the tokens of prompt 3" in result.message for result in results)


def mismatched_on_rank() -> Raised:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=3, num_engines=1, num_cores=64)
    raised: Raised = outcome(Generator, placement, ScriptedEngine(0) if collectives.rank else None, collectives)
    return raised


def test_an_engine_on_the_wrong_rank_is_refused(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(3).run(mismatched_on_rank)
    assert [result.kind for result in results] == ["EngineError"] * 3
