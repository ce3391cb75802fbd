"""Plain decode steps are scheduled as vLLM schedules them: each step, on a copy of the scheduler, field by field."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from colocate_rl.engine.decoding import Decoding
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.engine.conftest import weights
from tests.engine.ways import RAGGED, SMALL_CACHE, STOPS, core_of, schedule_asynchronously
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Build = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def twin_of(scheduler: Any) -> Any:
    """A copy of a scheduler with vLLM's own methods; what has no state of requests is shared."""
    shared = ("vllm_config", "structured_output_manager", "kv_event_publisher", "kv_cache_config", "schedule")
    memo = {id(vars(scheduler)[name]): vars(scheduler)[name] for name in shared}
    stand_in = scheduler.kv_cache_manager.allocate_slots
    memo[id(vars(scheduler)["update_from_output"])] = memo[id(stand_in)] = stand_in
    twin = copy.deepcopy(scheduler, memo)
    del twin.schedule, twin.update_from_output, twin.kv_cache_manager.allocate_slots
    return twin


def state_of(scheduler: Any) -> dict[str, Any]:
    """All that a step could change: of requests, of the scheduler and of the cache's blocks."""
    manager = scheduler.kv_cache_manager
    plain = (bool, int, float, str, list, type(None))
    (of_requests,) = manager.coordinator.single_type_managers
    return {
        "requests": {
            name: {field: value for field, value in vars(request).items() if isinstance(value, plain)}
            for name, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "scheduler": {
            name: value
            for name, value in vars(scheduler).items()
            if isinstance(value, (bool, int, str, set)) and name != "prefill_capacity_bound"  # of data parallel engines
            and not name.endswith("prefills")
        },
        "prefills": {request.request_id for request in scheduler._inflight_prefills},
        "blocks": {
            name: [(block.block_id, block.ref_cnt, block.block_hash) for block in blocks]
            for name, blocks in of_requests.req_to_blocks.items()
        },
        "cached": dict(of_requests.num_cached_block),
        "free": [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()],
    }  # fmt: skip


def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Has every step of :class:`Decoding` compared with vLLM's; counts them."""
    step, count = Decoding._step, Counter[str]()

    def both(self: Decoding, *found: Any) -> Any:
        twin = twin_of(self._scheduler)
        expected, ours = twin.schedule(), step(self, *found)
        expected.num_common_prefix_blocks = ours.num_common_prefix_blocks  # no longer filled in newer versions
        assert ours == expected
        assert state_of(self._scheduler) == state_of(twin)
        count["steps"] += 1
        count["finished"] += bool(ours.finished_req_ids)
        count["waiting"] += bool(self._scheduler.waiting)
        count["blocks"] += any(ours.scheduled_cached_reqs.new_block_ids)
        count["idle"] += len(self._scheduler.running) > len(ours.num_scheduled_tokens)
        return ours

    monkeypatch.setattr(Decoding, "_step", both)
    return count


@pytest.fixture
def _long_chains() -> Iterator[None]:
    """The cache's free blocks are a chain, which ``deepcopy`` follows."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * limit)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("_long_chains")
@pytest.mark.parametrize("ahead", [False, True])
def test_each_step_is_vllms(build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    if ahead:
        schedule_asynchronously(VllmEngine, monkeypatch)
    engine = build(model, extra=SMALL_CACHE, max_num_seqs=8)
    engine.load_weights(weights(model))
    count = compared(monkeypatch)
    engine.generate([Request(p, 3) for p in RAGGED[:8]], SamplingSpec(max_tokens=50, stop_token_ids=STOPS))
    engine.generate([Request(p, 1, seed=3) for p in RAGGED[:4]], SamplingSpec(max_tokens=126))
    assert core_of(engine).scheduler.requests == {}
    assert min(count[name] for name in ("finished", "waiting", "blocks")) > 5
    assert count["steps"] > 100
    assert (count["idle"] > 0) == ahead
