"""All ranks' prompts to all engines in one call each, and every completion back to the row that asked for it.

Every rank runs the same code: gather the unique prompts, cut them into slices, let the engine it hosts (if any) answer
its slice, gather the completions, pick its own. Rows are found by the index they carry, never by their text.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Background, Completion, Engine, FinishReason, Request, SamplingSpec
from colocate_rl.errors import EngineError
from colocate_rl.placement import Placement, split_evenly
from colocate_rl.rollout.records import EngineStats, Prompt

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt as all ranks together want it."""

    index: int
    token_ids: tuple[int, ...]
    num_copies: int


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive copies of one group, answered by one engine in one request."""

    group: int
    """Position in the list of groups."""
    first_copy: int
    num_copies: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A generation batch that the engines have been asked for."""

    prompts: list[Prompt]
    """This rank's."""
    first_copy: list[int]
    """Of each of them, the first copy that is this rank's."""
    groups: list[Group]
    parts: list[list[Part]]
    """Of each engine."""
    requests: list[Request]
    """For the engine of this rank; empty without one."""
    sampling: SamplingSpec
    policy_version: int


def assign(copies: Sequence[int], num_engines: int) -> list[list[Part]]:
    """Decides which engine answers which copies of which group.

    Whole groups go to one engine (it prefills the prompt once) in consecutive slices whose lengths differ by at most
    one. With fewer groups than engines the copies are spread instead, so that no engine idles while there is work.

    Args:
        copies: copies wanted of each group.
        num_engines: K.

    Returns:
        One list of parts per engine; every copy of every group is in exactly one part.
    """
    if len(copies) >= num_engines:
        return [
            [Part(group, 0, copies[group]) for group in span if copies[group]]
            for span in split_evenly(len(copies), num_engines)
        ]
    rows = [(group, copy) for group, count in enumerate(copies) for copy in range(count)]
    parts: list[list[Part]] = []
    for span in split_evenly(len(rows), num_engines):
        mine: dict[int, list[int]] = {}
        for position in span:
            group, copy = rows[position]
            mine.setdefault(group, []).append(copy)
        parts.append([Part(group, numbers[0], len(numbers)) for group, numbers in mine.items()])
    return parts


class Generator:
    """Generates for all ranks with the engines that some of them host.

    Args:
        placement: who hosts what.
        engine: the engine (or shard) inside this rank, or None.
        collectives: of the training ranks.
        check_prompt: called with each gathered prompt's length and name; raises to refuse it (on all ranks alike).
    """

    def __init__(
        self,
        placement: Placement,
        engine: Engine | None,
        collectives: Collectives,
        check_prompt: Callable[[int, str], None] = lambda length, where: None,
    ) -> None:
        self._placement = placement
        self._engine = engine
        self._shard = placement.shard_of(collectives.rank)
        self._collectives = collectives
        self._check_prompt = check_prompt
        if (engine is None) != (self._shard is None):
            raise EngineError(f"rank {collectives.rank}: engine {engine!r} does not match placement {self._shard!r}.")

    def begin(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, policy_version: int, seed: int | None = None
    ) -> Pending:
        """Hands every rank's prompts to the engines; all ranks must call it, also with no prompts of their own.

        An engine in the background starts at once, one inside the rank answers when :meth:`finish` is called.

        Args:
            prompts: this rank's prompts, each index once; an index may also appear on other ranks (a group that
                straddles ranks).
            sampling: the same on all ranks.
            policy_version: of the weights the engines have; every completion carries it.
            seed: of this rollout, the same on all ranks: completions then depend on it, the prompt's index and the copy
                alone, not on the number of engines. None: the engines sample from their own streams.
        """
        groups, first_copy = self._gather_groups(prompts)
        with self._collectives.failing_together("checking prompts"):
            for group in groups:
                self._check_prompt(len(group.token_ids), f"The prompt of row {group.index}")
        parts = assign([group.num_copies for group in groups], self._placement.num_engines)
        requests: list[Request] = []
        with self._collectives.failing_together("handing prompts to the engines"):
            if self._shard is not None:
                requests = _requests(groups, parts[self._shard.engine], seed)
            if requests and isinstance(self._engine, Background):
                self._engine.begin(requests, sampling)
        return Pending(list(prompts), first_copy, groups, parts, requests, sampling, policy_version)

    def finish(self, pending: Pending) -> tuple[list[list[Completion]], list[EngineStats]]:
        """Brings every completion back to the rank that asked for it; all ranks must call it, once for each begin.

        Returns:
            The completions of each of this rank's prompts, in order, and one record per engine.
        """
        answers: list[list[Completion]] = []
        seconds = 0.0
        with self._collectives.failing_together("generating completions"):
            if self._engine is not None and pending.requests:
                answers, seconds = self._answer(self._engine, pending)
        rows, stats = self._gather_answers(answers, pending, seconds)
        mine = []
        for prompt, first in zip(pending.prompts, pending.first_copy, strict=True):
            mine.append([rows[prompt.index, copy] for copy in range(first, first + prompt.num_copies)])
        return mine, stats

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec,
        seed: int | None = None,
        policy_version: int = 0,
    ) -> tuple[list[list[Completion]], list[EngineStats]]:
        """:meth:`begin` and :meth:`finish` in one call."""
        return self.finish(self.begin(prompts, sampling, policy_version=policy_version, seed=seed))

    def _gather_groups(self, prompts: Sequence[Prompt]) -> tuple[list[Group], list[int]]:
        """Merges all ranks' prompts to groups, and finds the first copy that belongs to each local prompt."""
        heads = torch.tensor([[p.index, p.num_copies, len(p.token_ids)] for p in prompts], dtype=torch.int64)
        ids = torch.tensor([token for p in prompts for token in p.token_ids], dtype=torch.int64)
        all_heads = self._collectives.gather_ragged(heads.view(-1, 3))
        all_ids = self._collectives.gather_ragged(ids)
        groups: dict[int, Group] = {}
        first_copy: list[int] = []
        for rank, (rank_heads, rank_ids) in enumerate(zip(all_heads, all_ids, strict=True)):
            position = 0
            tokens = rank_ids.tolist()
            for index, copies, length in rank_heads.tolist():
                token_ids = tuple(tokens[position : position + length])
                position += length
                known = groups.get(index)
                if known is not None and known.token_ids != token_ids:
                    raise EngineError(f"ranks disagree about the tokens of prompt {index}: {known.token_ids[:8]}...")
                before = 0 if known is None else known.num_copies
                groups[index] = Group(index, token_ids, before + copies)
                if rank == self._collectives.rank:
                    first_copy.append(before)
        return list(groups.values()), first_copy

    @staticmethod
    def _answer(engine: Engine, pending: Pending) -> tuple[list[list[Completion]], float]:
        if isinstance(engine, Background):
            answers, seconds = engine.finish()
        else:
            start = time.perf_counter()
            answers = engine.generate(pending.requests, pending.sampling)
            seconds = time.perf_counter() - start
        counts = [len(answer) for answer in answers]
        wanted = [request.num_completions for request in pending.requests]
        if counts != wanted:
            raise EngineError(f"the engine was asked for {wanted} completions and gave {counts}.")
        for answer in answers:
            for completion in answer:
                if len(completion.token_ids) != len(completion.sampling_logprobs):
                    raise EngineError(
                        f"the engine gave {len(completion.token_ids)} token ids but "
                        f"{len(completion.sampling_logprobs)} log-probabilities for one completion."
                    )
        return answers, seconds

    def _gather_answers(
        self,
        answers: Sequence[Sequence[Completion]],
        pending: Pending,
        seconds: float,
    ) -> tuple[dict[tuple[int, int], Completion], list[EngineStats]]:
        """Shares every engine's completions with all ranks as flat tensors; keys are (prompt index, copy)."""
        speaks = self._shard is not None and self._shard.index == 0
        flat = [completion for answer in answers for completion in answer] if speaks else []
        heads = torch.tensor(
            [[len(c.token_ids), _FINISH_REASONS.index(c.finish_reason)] for c in flat], dtype=torch.int64
        )
        gather = self._collectives.gather_ragged
        all_heads = gather(heads.view(-1, 2))
        all_ids = gather(torch.from_numpy(_joined([c.token_ids for c in flat], np.int64)))
        all_logprobs = gather(torch.from_numpy(_joined([c.sampling_logprobs for c in flat], np.float32)))
        all_seconds = gather(torch.tensor([seconds], dtype=torch.float64))
        rows: dict[tuple[int, int], Completion] = {}
        stats = []
        for engine, engine_parts in enumerate(pending.parts):
            rank = self._placement.host_of(engine)
            tokens, values = all_ids[rank].tolist(), all_logprobs[rank].tolist()
            heads_left = iter(all_heads[rank].tolist())
            position = 0
            for part in engine_parts:
                for copy in range(part.first_copy, part.first_copy + part.num_copies):
                    length, reason = next(heads_left)
                    span = slice(position, position + length)
                    key = pending.groups[part.group].index, copy
                    rows[key] = Completion(tokens[span], values[span], _FINISH_REASONS[reason], pending.policy_version)
                    position += length
            stats.append(EngineStats(engine, len(engine_parts), position, float(all_seconds[rank].item())))
        return rows, stats


def _requests(groups: Sequence[Group], parts: Sequence[Part], seed: int | None) -> list[Request]:
    requests = []
    for part in parts:
        group = groups[part.group]
        own = None if seed is None else request_seed(seed, group.index) + part.first_copy
        requests.append(Request(group.token_ids, part.num_copies, own))
    return requests


def _joined(lists: Sequence[Sequence[int] | Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists]) if lists else np.zeros(0, dtype)


def request_seed(seed: int, index: int) -> int:
    """A seed for the first copy of a prompt: fixed by the rollout's seed and the prompt's index, 2**20 apart."""
    return zlib.crc32(f"{seed}/{index}".encode()) << 20
