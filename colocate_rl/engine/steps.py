"""A decode step's bookkeeping in one loop, for the tokens that end nothing."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from colocate_rl.engine.decoding import Decoding
from colocate_rl.engine.known import names_of, num_placeholders, unread_schedule
from colocate_rl.engine.protocol import Completion, FinishReason
from colocate_rl.errors import EngineError

logger = logging.getLogger(__name__)

WRONG_TOKENS = "the engine's log-probabilities belong to other tokens than it sampled."
STALE = ("num_stale_output_tokens", "async_tokens_to_discard")
"""How versions count the tokens of a request that are still to come but are not to be taken over in the usual way."""
EXTRAS = (
    "pooler_output",
    "prompt_logprobs_dict",
    "prompt_token_id_logprobs_dict",
    "kv_connector_output",
    "ec_connector_output",
    "num_nans_in_logits",
    "routed_experts",
    "aux_output_connector_output",
    "sampling_masks",
)
"""What a step must not have brought beside tokens."""


@dataclass(slots=True)
class Unfinished:
    """A completion in the making."""

    num_prompt_tokens: int
    stops: frozenset[int | None]
    """Ids that end it."""
    limit: int
    """It ends with this many tokens; 0: every token of it is vLLM's to take over."""
    position: int = 0
    """Of its prompt among those asked for."""
    request: Any = None
    """The engine core's request, once it has sampled."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def completion(self) -> Completion:
        """What came of it.

        Raises:
            EngineError: when it was not sampled to its end.
        """
        if self.finish_reason not in ("stop", "length"):
            raise EngineError(f"a completion ended with {self.finish_reason!r} after {len(self.token_ids)} tokens.")
        reason: FinishReason = "stop" if self.finish_reason == "stop" else "length"
        if len(self.logprobs) != len(self.token_ids):
            raise EngineError(
                f"the engine gave {len(self.token_ids)} tokens and {len(self.logprobs)} log-probabilities."
            )
        return Completion(self.token_ids, self.logprobs, reason)


class Steps:
    """The plain part of a step's bookkeeping in our own scheduler; the rest stays with vLLM's methods.

    Args:
        core: the engine core of this process.
    """

    def __init__(self, core: Any) -> None:
        self._scheduler = core.scheduler
        self._manager = core.scheduler.kv_cache_manager
        self._block_size: int = core.scheduler.block_size
        self._running = names_of(core.scheduler)["RequestStatus"].RUNNING
        self._placeholders = num_placeholders(core.scheduler)
        self._in_flight = False
        self._stale = ""
        self._sequences: dict[str, Unfinished] = {}
        self._update: Callable[..., Any] = core.scheduler.update_from_output
        self._allocate: Callable[..., Any] = core.scheduler.kv_cache_manager.allocate_slots
        unread = unread_schedule(core)
        if unread:
            logger.info("Each step is scheduled by vLLM, which has other versions of %s.", ", ".join(unread))
        self.decoding = None if unread else Decoding(core)
        """Who schedules plain steps; None: vLLM."""

    @contextlib.contextmanager
    def standing_in(self, sequences: dict[str, Unfinished]) -> Iterator[None]:
        """Until the block ends, takes over the steps of the requests in ``sequences``."""
        self._sequences = sequences
        self._update, self._allocate = self._scheduler.update_from_output, self._manager.allocate_slots
        with (
            replaced(self._scheduler, "update_from_output", self.update_from_output),
            replaced(self._manager, "allocate_slots", self.allocate_slots),
            self._scheduling(),
        ):
            yield

    @contextlib.contextmanager
    def _scheduling(self) -> Iterator[None]:
        if self.decoding is None:
            yield
            return
        self.decoding.usual = self._scheduler.schedule
        with replaced(self._scheduler, "schedule", self.decoding.schedule):
            yield

    def allocate_slots(self, request: Any, num_new_tokens: int, **others: Any) -> Any:
        """Nothing to do while the next token fits into the last block; filling a block (to be cached) is vLLM's."""
        if (
            num_new_tokens == 1
            and 0 < request.num_computed_tokens % self._block_size < self._block_size - 1
            and request.status is self._running
            and others == {"num_lookahead_tokens": 0}
        ):
            return self._manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, **others)

    def update_from_output(self, step: Any, sampled: Any) -> Any:
        """Takes over the tokens that end nothing, and has vLLM take over the others."""
        if not _is_plain(step, sampled):
            return self._update(step, sampled)
        remainder = copy.copy(step)
        remainder.num_scheduled_tokens = self._append(step.num_scheduled_tokens, sampled)
        return self._update(remainder, sampled)

    def _append(self, scheduled: Mapping[str, int], sampled: Any) -> dict[str, int]:
        """Appends every token that does not end its completion, of requests in their usual state.

        This loop is the price of a step: about a microsecond a token. It changes what vLLM's
        ``update_from_output`` changes for such a token.

        Returns:
            the requests that are left to vLLM.
        """
        ids: list[int] = sampled.logprobs.logprob_token_ids[:, 0].tolist()
        logprobs: list[float] = sampled.logprobs.logprobs[:, 0].tolist()
        tokens, rows, sequences = sampled.sampled_token_ids, sampled.req_id_to_index, self._sequences
        block_size, running, placeholders = self._block_size, self._running, self._placeholders
        in_flight, stale = self._in_flight, self._stale
        left: dict[str, int] = {}
        for request_id, num_scheduled in scheduled.items():
            sequence, row = sequences.get(request_id), rows[request_id]
            request = None if sequence is None else sequence.request
            if sequence is None or request is None or num_scheduled != 1 or len(tokens[row]) != 1:
                left[request_id] = num_scheduled
                if sequence is not None and tokens[row]:
                    self._meet(sequence, request_id)
                continue
            token, num_tokens = ids[row], len(sequence.token_ids) + 1
            if (
                num_tokens >= sequence.limit
                or token in sequence.stops
                or request.status is not running
                or getattr(request, stale)
            ):
                left[request_id] = num_scheduled
                continue
            if tokens[row][0] != token:
                raise EngineError(WRONG_TOKENS)
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if (sequence.num_prompt_tokens + num_tokens) % block_size == 0:
                request.update_block_hashes()
            request.num_output_placeholders -= placeholders
            if in_flight:
                request.num_in_flight_tokens -= 1
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprobs[row])
        return left

    def _meet(self, sequence: Unfinished, request_id: str) -> None:
        """Remembers the core's request of a completion, which vLLM's method is about to give its first token."""
        request = sequence.request = self._scheduler.requests.get(request_id)
        if request is not None:
            self._in_flight = hasattr(request, "num_in_flight_tokens")
            self._stale = next(name for name in STALE if hasattr(request, name))


def _is_plain(step: Any, sampled: Any) -> bool:
    """Whether a step has sampled at most one token of each request, and nothing but tokens and log-probabilities."""
    return (
        sampled.logprobs is not None
        and sampled.logprobs.cu_num_generated_tokens is None
        and bool(sampled.sampled_token_ids)
        and not step.scheduled_spec_decode_tokens
        and not any(getattr(sampled, name, None) for name in EXTRAS)
    )


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of one attribute of one object of ours, until the block ends."""
    own = vars(owner)
    before = own.get(name, own)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is own:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
