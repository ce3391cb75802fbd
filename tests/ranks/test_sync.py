"""Weights go into every engine before its first rollout and after every move, completely, and are checked once."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.placement import Placement
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.sync import PROBE_PROMPT_TOKENS, PROBE_PROMPTS, PROBE_TOKENS, WeightSync
from tests.ranks.launch import Ranks, outcome
from tests.ranks.scripted import Fault, ScriptedEngine, scripted_logprob

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

VOCAB = 288
WORLDS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
every_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: "W{}-K{}".format(*world))


def small_policy() -> torch.nn.Module:
    """Two layers that share a weight, and values that a cast would change."""
    torch.manual_seed(3)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    policy[1].weight = policy[0].weight
    return policy


def policy_logprobs(batch: RolloutBatch) -> torch.Tensor:
    """The scripted model's own log-probabilities, worked out from ids and masks alone."""
    values = torch.full(batch.input_ids.shape, 123.0)  # nobody may look outside of the completions
    for row in range(batch.num_rows):
        columns = batch.completion_mask[row].nonzero().view(-1).tolist()
        for place, column in enumerate(columns):
            values[row, column] = scripted_logprob(int(batch.input_ids[row, column]), place)
    return values


@dataclass(frozen=True, slots=True)
class Step:
    """After one call of sync."""

    copied: bool
    num_loads: int
    num_probes: int
    equal: bool
    """The engine's weights are the policy's, bit for bit."""


def build(
    num_engines: int, *, limit: float, error: float = 0.0, fault_on: dict[int, Fault] | None = None
) -> tuple[WeightSync, ScriptedEngine | None, torch.nn.Module]:
    collectives = Collectives(torch.device("cpu"))
    placement = Placement.on_cpu(num_ranks=collectives.world_size, num_engines=num_engines, num_cores=64)
    shard = placement.shard_of(collectives.rank)
    engine = None
    if shard is not None:
        engine = ScriptedEngine(shard.engine, fault=(fault_on or {}).get(collectives.rank), logprob_error=error)
    policy = small_policy()
    sync = WeightSync(engine, policy, collectives, policy_logprobs, vocab_size=VOCAB, gap_limit=limit)
    return sync, engine, policy


def move(policy: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.rand_like(parameter))


def sync_in_turn(num_engines: int, limit: float) -> list[Step]:
    """First, again, after a move, again, after invalidate, again; weights also move without a new version."""
    sync, engine, policy = build(num_engines, limit=limit)
    steps = []
    for version, moved, invalidated in [
        (0, False, False),
        (0, True, False),
        (1, True, False),
        (1, False, False),
        (1, True, True),
        (1, False, False),
        (0, True, False),
    ]:
        if moved:
            move(policy)
        if invalidated:
            sync.invalidate()
        copied = sync.sync(version)
        weights = dict(policy.named_parameters())
        equal = engine is None or (
            engine.weights.keys() == weights.keys()
            and all(torch.equal(engine.weights[name], weights[name]) for name in weights)
            and not any(tensor.requires_grad for tensor in engine.weights.values())
        )
        num_loads, num_probes = (engine.num_loads, len(engine.calls)) if engine is not None else (0, 0)
        steps.append(Step(copied, num_loads, num_probes, equal))
    return steps


def run(ranks: Callable[[int], Ranks], world_size: int, *call: object) -> list[object]:
    function, *arguments = call
    assert callable(function)
    return [function(*arguments)] if world_size == 1 else ranks(world_size).run(function, *arguments)


@every_world
def test_weights_are_copied_when_the_version_moves(ranks: Callable[[int], Ranks], world: tuple[int, int]) -> None:
    results = run(ranks, world[0], sync_in_turn, world[1], 1e-6)
    for rank, steps in enumerate(results):
        assert isinstance(steps, list)
        assert [step.copied for step in steps] == [True, False, True, False, True, False, True]
        if rank < world[1]:
            assert [step.num_loads for step in steps] == [1, 1, 2, 2, 3, 3, 4]
            # Where nothing was copied the weights had moved under the same version, once: the copy is not a view.
            assert [step.equal for step in steps] == [True, False, True, True, True, True, True]
            assert [step.num_probes for step in steps] == [1] * 7, "checked once in a run"


def test_a_limit_of_zero_asks_no_probe(ranks: Callable[[int], Ranks]) -> None:
    for steps in ranks(3).run(sync_in_turn, 2, 0.0):
        assert [step.num_probes for step in steps] == [0] * 7
        assert steps[0].copied


def test_the_probe_is_the_same_everywhere() -> None:
    sync, engine, _ = build(1, limit=1e-6)
    assert engine is not None
    torch.manual_seed(5)
    state = torch.get_rng_state()
    sync.sync(0)
    (call,) = engine.calls
    assert len(call.requests) == PROBE_PROMPTS
    assert all(len(request.token_ids) == PROBE_PROMPT_TOKENS for request in call.requests)
    assert all(0 <= token < VOCAB for request in call.requests for token in request.token_ids)
    assert len({request.seed for request in call.requests}) == PROBE_PROMPTS
    assert call.sampling.max_tokens == PROBE_TOKENS
    assert call.sampling.temperature == 1.0
    assert torch.equal(torch.get_rng_state(), state), "the run's own random numbers are left alone"


def sync_with_gap(num_engines: int, limit: float, error: float, on: int) -> object:
    """The engine of rank ``on`` reports log-probabilities that are off by ``error``."""
    rank = Collectives(torch.device("cpu")).rank
    sync, _, _ = build(num_engines, limit=limit, error=error if rank == on else 0.0)
    return outcome(sync.sync, 0)


@pytest.mark.parametrize("on", [0, 1])
def test_a_gap_beyond_the_limit_ends_all_ranks(ranks: Callable[[int], Ranks], on: int) -> None:
    results = ranks(3).run(sync_with_gap, 2, 0.1, 0.25, on)
    kinds = [result.kind for result in results]
    assert kinds == ["WeightSyncError" if rank == on else "PeerError" for rank in range(3)]
    for number in ("0.25 nats on average (largest 0.25)", "the accepted 0.1"):
        assert number in results[on].message
    assert f"rank {on} failed while checking the engines' weights" in results[2].message
    assert all(result.seconds < 10 for result in results)


@pytest.mark.parametrize(("limit", "error"), [(0.1, 0.0625), (0.0, 5.0)], ids=["within", "switched off"])
def test_a_gap_within_the_limit_or_unlimited_is_accepted(
    ranks: Callable[[int], Ranks], limit: float, error: float
) -> None:
    assert ranks(3).run(sync_with_gap, 2, limit, error, 0) == [True, True, True]


def test_a_gap_that_is_no_number_is_not_accepted() -> None:
    assert sync_with_gap(1, 0.1, float("nan"), 0).kind == "WeightSyncError"  # type: ignore[attr-defined]


def sync_with_fault(fault: Fault) -> list[object]:
    """An engine that fails at the first sync and its repetition, and then works."""
    sync, engine, _ = build(2, limit=0.1, fault_on={1: fault})
    first, second = outcome(sync.sync, 0), outcome(sync.sync, 0)
    if engine is not None:
        engine.fault = None
    return [first, second, outcome(sync.sync, 0), engine is None or engine.num_loads > 0]


@pytest.mark.parametrize("fault", ["refuse weights", "raise"])
def test_an_engine_that_failed_is_not_taken_for_synced(ranks: Callable[[int], Ranks], fault: Fault) -> None:
    results = ranks(3).run(sync_with_fault, fault)
    for attempt in (0, 1):
        assert [getattr(result[attempt], "kind", None) for result in results] == [
            "PeerError",
            "RuntimeError",
            "PeerError",
        ]
    assert [result[2] for result in results] == [True] * 3
    assert all(result[3] for result in results)
