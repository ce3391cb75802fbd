"""A second scheduler in the same state, which takes the same step in vLLM's way."""

import copy
from collections import Counter
from typing import Any

import pytest

from colocate_rl.engine.decoding import Decoding

SHARED = ("structured_output_manager", "kv_event_publisher", "schedule")
"""What a twin has in common with its scheduler, besides configurations: it has no state of requests."""
OTHERS = ("prefill_capacity_bound", "next_decode_eligible_step")
"""What vLLM changes in a plain step, but only data or pipeline parallel engines read."""


def twin_of(scheduler: Any) -> Any:
    """A copy of a scheduler that is stood in for, with vLLM's own methods."""
    own = vars(scheduler)
    shared = [value for name, value in own.items() if name.endswith("_config") or name in SHARED]
    shared += [own["update_from_output"], scheduler.kv_cache_manager.allocate_slots]
    twin = copy.deepcopy(scheduler, {id(value): value for value in shared})
    del twin.schedule, twin.update_from_output, twin.kv_cache_manager.allocate_slots
    return twin


def state_of(scheduler: Any) -> dict[str, Any]:
    """All that a step could change: of requests, of the scheduler and of the cache's blocks."""
    manager = scheduler.kv_cache_manager
    (of_requests,) = manager.coordinator.single_type_managers
    return {
        "requests": {
            name: _plain(request, bool, int, float, str, list, type(None))
            for name, request in scheduler.requests.items()
        },
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "scheduler": _plain(scheduler, bool, int, str, set),
        "blocks": {
            name: [(block.block_id, block.ref_cnt, block.block_hash) for block in blocks]
            for name, blocks in of_requests.req_to_blocks.items()
        },
        "cached": dict(of_requests.num_cached_block),
        "free": [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()],
    }


def _plain(owner: Any, *kinds: type) -> dict[str, Any]:
    """Attributes of some types; of sets of requests, the requests' ids."""
    return {
        name: {getattr(item, "request_id", item) for item in value} if isinstance(value, set) else value
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and name not in OTHERS
    }


def compare_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Has every step of :class:`Decoding` compared with vLLM's; counts steps, by what happens in them."""
    step, count = Decoding._step, Counter[str]()

    def both(self: Decoding, *found: Any) -> Any:
        twin = twin_of(self._scheduler)
        expected, ours = twin.schedule(), step(self, *found)
        expected.num_common_prefix_blocks = expected.num_common_prefix_blocks or [0]  # newer versions fill in none
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
