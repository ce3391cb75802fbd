"""The schedule of a step in which every running request decodes one plain token.

Nearly all steps of a generation are such steps, and vLLM's ``schedule`` then finds out per request, through checks,
allocations and lists, what was known before: one token each, and now and then a block. Here the requests are looked at
in one loop; if anything is unusual, nothing has been changed and vLLM's own ``schedule`` takes the step.
"""

from collections.abc import Callable
from typing import Any

from colocate_rl.engine.known import names_of, num_placeholders


class Decoding:
    """Schedules the plain decode steps of our own scheduler; the rest stays with vLLM's method.

    Args:
        core: the engine core of this process.
    """

    def __init__(self, core: Any) -> None:
        names = names_of(core.scheduler)
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self._make_empty: Callable[[], Any] = names["SchedulerOutput"].make_empty
        self._unpaused = names["PauseState"].UNPAUSED
        self._block_size: int = core.scheduler.block_size
        self._placeholders = num_placeholders(core.scheduler)
        self._most_running: int = getattr(core.scheduler, "max_num_active_reqs", core.scheduler.max_num_running_reqs)
        self._most_tokens = min(
            core.scheduler.max_num_scheduled_tokens, core.scheduler.scheduler_config.max_num_batched_tokens
        )
        self._last_position: int = core.scheduler.max_model_len - 1
        self.usual: Callable[..., Any] = core.scheduler.schedule
        """vLLM's method."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step, as vLLM's ``schedule`` makes it."""
        found = self._decoding() if not throttle_prefills and self._is_calm() else None
        return self.usual(throttle_prefills) if found is None else self._step(*found)

    def _is_calm(self) -> bool:
        """Whether requests that run are all that a step could be about."""
        scheduler = self._scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        return (
            (not num_waiting or num_running >= self._most_running)
            and num_running <= self._most_tokens
            and scheduler._pause_state is self._unpaused
            and not getattr(scheduler, "reset_preempted_req_ids", None)
        )

    def _decoding(self) -> tuple[list[Any], list[int], list[int]] | None:
        """The requests that decode one token in the next step, if no others do anything else and blocks are enough.

        Prompts are token ids, so there are no encoders to be thought of.

        Returns:
            the requests, how many tokens of each are computed, and the places of those that the allocator has to see: a
            token at a block's start needs a new one, and once the last token of a block is known the block is cached.
        """
        size, last = self._block_size, self._last_position
        requests: list[Any] = []
        counts: list[int] = []
        edges: list[int] = []
        num_starts = 0
        for request in self._scheduler.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if computed >= last or (ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens):
                continue  # the step that is under way samples its last token
            known = len(request._all_token_ids)
            if (
                known + ahead != computed + 1
                or request.is_prefill_chunk
                or request.spec_token_ids
                or request.structured_output_request is not None
            ):
                return None
            if not (computed % size and known % size):
                edges.append(len(requests))
                num_starts += not computed % size
            requests.append(request)
            counts.append(computed)
        enough = num_starts <= self._manager.block_pool.get_num_free_blocks()
        return (requests, counts, edges) if requests and enough else None

    def _step(self, requests: list[Any], counts: list[int], edges: list[int]) -> Any:
        """One token of each of these requests."""
        scheduler, manager = self._scheduler, self._manager
        ids = [request.request_id for request in requests]
        if not scheduler.use_v2_model_runner:
            before = scheduler.prev_step_scheduled_req_ids
            if not before.issuperset(ids):
                return self.usual()  # the worker has to be told all tokens of the others
            before.clear()
            before.update(ids)
        scheduler.current_step += 1
        manager.new_step_starts()
        blocks: list[Any] = [None] * len(ids)
        for place in edges:
            blocks[place] = self._new_blocks(requests[place], counts[place])
        manager.take_new_block_ids()  # which only caches that are zeroed ask for
        step = self._make_empty()
        step.scheduled_cached_reqs.req_ids = ids
        step.scheduled_cached_reqs.new_block_ids = blocks
        step.scheduled_cached_reqs.num_computed_tokens = counts
        step.scheduled_cached_reqs.num_output_tokens = self._advance(requests, counts)
        step.num_scheduled_tokens = dict.fromkeys(ids, 1)
        step.total_num_scheduled_tokens = len(ids)
        step.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(scheduler.running[0].request_id)
        step.preempted_req_ids = set()
        step.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        return step

    def _new_blocks(self, request: Any, computed: int) -> tuple[list[int], ...] | None:
        """What is left of vLLM's ``allocate_slots`` where free blocks are enough and no window slides."""
        found = self._manager.coordinator.allocate_new_blocks(request.request_id, computed + 1, computed + 1)
        self._manager.cache_blocks(request, min(computed + 1, len(request._all_token_ids)))
        return tuple([block.block_id for block in group] for group in found) if any(found) else None

    def _advance(self, requests: list[Any], counts: list[int]) -> list[int]:
        """Changes what vLLM's ``_update_after_schedule`` changes in requests that decode.

        Returns:
            how many tokens of each request are sampled, those under way included.
        """
        placeholders, in_flight = self._placeholders, hasattr(requests[0], "num_in_flight_tokens")
        num_sampled = []
        for request, computed in zip(requests, counts, strict=True):
            request.num_computed_tokens = computed + 1
            request.num_output_placeholders += placeholders
            if in_flight:
                request.num_in_flight_tokens += 1
            num_sampled.append(computed + 1 - request.num_prompt_tokens)
        return num_sampled
