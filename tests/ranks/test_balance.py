"""Engines that finish together: a slow one leaves what it has not started to the others."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, Deliver, Request, SamplingSpec, Work
from colocate_rl.placement import Placement
from colocate_rl.rollout.generate import Generator, request_seed
from colocate_rl.rollout.records import EngineStats, Prompt
from tests.ranks.launch import Ranks
from tests.ranks.scripted import ScriptedEngine, scripted_completion, seed_source

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

COPIES = 2
NUM_PROMPTS = 30
GROUP_S = 0.04
"""An engine of speed 1 needs this long for a group."""
SEED = 11


class SteadyEngine(ScriptedEngine):
    """Runs one group at a time, in ``seconds`` each."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(number)
        self._seconds = seconds

    def work_off(self, work: Work, sampling: SamplingSpec, deliver: Deliver) -> None:
        waiting = list(range(work.num_own))
        while True:
            if not waiting:
                position = work.claim()
                if position is None:
                    return
                waiting.append(position)
            time.sleep(self._seconds)
            deliver(waiting[0], super().generate([work.requests[waiting.pop(0)]], sampling)[0])


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[list[Completion]]
    stats: list[EngineStats]
    answered: list[tuple[int, ...]]
    """Prompts of this rank's engine, in order."""


def generate_on_rank(speeds: Sequence[float], capacity: int | None, rounds: int, seed: int | None) -> Report:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=collectives.world_size, num_engines=len(speeds), num_cores=64)
    shard = placement.shard_of(collectives.rank)
    engine = None if shard is None else SteadyEngine(shard.engine, GROUP_S / speeds[shard.engine])
    generator = Generator(placement, engine, collectives, capacity=capacity)
    share = NUM_PROMPTS // collectives.world_size
    mine = range(collectives.rank * share, (collectives.rank + 1) * share)
    prompts = [Prompt(index, (index,) * (index + 1), COPIES) for index in mine]
    for _ in range(rounds):
        before = 0 if engine is None else len(engine.calls)
        rows, stats = generator.generate(prompts, SamplingSpec(max_tokens=9), seed)
    calls: list[Request] = [] if engine is None else [call.requests[0] for call in engine.calls[before:]]
    return Report(rows, stats, [tuple(request.token_ids) for request in calls])


def expected_rows(world_size: int) -> list[list[list[Completion]]]:
    share = NUM_PROMPTS // world_size
    return [
        [
            [
                scripted_completion((index,) * (index + 1), seed_source(request_seed(SEED, index) + copy))
                for copy in range(COPIES)
            ]
            for index in range(rank * share, (rank + 1) * share)
        ]
        for rank in range(world_size)
    ]


def test_a_slow_engine_leaves_its_remainder_to_the_other(ranks: Callable[[int], Ranks]) -> None:
    """Speeds 1 and 1/3; balanced they need N / (1 + 1/3) groups' time, in even shares the slow one N / 2 * 3."""
    balanced_s, took_s = NUM_PROMPTS * GROUP_S / (1 + 1 / 3), []
    for _ in range(3):  # a busy machine wakes sleepers late: the best of three
        reports = ranks(3).run(generate_on_rank, (1.0, 1 / 3), COPIES, 2, SEED)
        assert [report.rows for report in reports] == expected_rows(3)
        stats = reports[0].stats
        took_s.append(max(stat.spans[0].end for stat in stats) - min(stat.spans[0].start for stat in stats))
        if took_s[-1] < 1.2 * balanced_s:
            break
    assert min(took_s) < 1.2 * balanced_s
    assert sum(stat.num_prompts for stat in stats) == NUM_PROMPTS
    assert stats[0].num_prompts > 2 * stats[1].num_prompts > 0


def test_without_room_for_all_the_longest_expected_come_first(ranks: Callable[[int], Ranks]) -> None:
    first = ranks(2).run(generate_on_rank, (1.0, 1.0), COPIES, 1, SEED)
    for report in first:  # nothing is known but prompts, whose lengths all differ
        lengths = [len(token_ids) for token_ids in report.answered]
        assert lengths == sorted(lengths, reverse=True)
    second = ranks(2).run(generate_on_rank, (1.0, 1.0), COPIES, 2, SEED)
    cost = {
        (index,) * (index + 1): index + 1 + sum(len(completion.token_ids) for completion in row)
        for index, row in enumerate(row for rank in expected_rows(2) for row in rank)
    }
    for report in second:
        costs = [cost[token_ids] for token_ids in report.answered]
        assert costs == sorted(costs, reverse=True)


def test_what_fits_at_once_stays_where_it_was_dealt(ranks: Callable[[int], Ranks]) -> None:
    for capacity in (None, NUM_PROMPTS * COPIES):
        reports = ranks(2).run(generate_on_rank, (4.0, 40.0), capacity, 1, SEED)
        assert [report.rows for report in reports] == expected_rows(2)
        assert [stat.num_prompts for stat in reports[0].stats] == [NUM_PROMPTS // 2] * 2
