"""All ranks' prompts to all engines, and every completion back to the rows that asked for it.

Every rank runs the same code: gather the unique prompts, deal them to the engines, let the engine it hosts (if any)
work its share off, exchange the completions, pick its own. Rows are found by the index they carry, never by their text.
"""

import contextlib
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.claims import FileClaims
from colocate_rl.engine.protocol import (
    Background,
    Completion,
    Engine,
    FinishReason,
    Incremental,
    Request,
    SamplingSpec,
    Span,
    Work,
)
from colocate_rl.errors import EngineError
from colocate_rl.placement import Placement, split_evenly
from colocate_rl.rollout.handout import ExpectedLengths, Group, Part, Plan, plan
from colocate_rl.rollout.records import EngineStats, Prompt

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")

Answer = tuple[int, list[Completion]]
"""Position of a part in its plan, and the completions of its copies."""


@dataclass(slots=True)
class Pending:
    """A generation batch that the engines have been asked for, and what has come of it so far."""

    prompts: list[Prompt]
    """This rank's."""
    first_copy: list[int]
    """Of each of them, the first copy that is this rank's."""
    groups: list[Group]
    plan: Plan
    work: Work
    """Of the engine of this rank; without requests where there is none."""
    positions: list[int]
    """In the plan, of each request of ``work``."""
    sampling: SamplingSpec
    policy_version: int
    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)
    """Those of all ranks that have come, by prompt index and copy."""
    missing: list[int] = field(default_factory=list)
    """Copies of each group that have not come."""
    answered: list[list[Part]] = field(default_factory=list)
    """Parts that each engine has answered."""

    @property
    def is_whole(self) -> bool:
        """Whether every completion has come."""
        return not any(self.missing)

    def rows(self, prompts: Sequence[tuple[Prompt, int]]) -> list[list[Completion]]:
        """Completions of some of this rank's prompts, each given with its first copy."""
        return [
            [self.completions[prompt.index, copy] for copy in range(first, first + prompt.num_copies)]
            for prompt, first in prompts
        ]


class Generator:
    """Generates for all ranks with the engines that some of them host; every rank must construct it.

    Args:
        placement: who hosts what.
        engine: the engine (or shard) inside this rank, or None.
        collectives: of the training ranks.
        check_prompt: called with each gathered prompt's length and name; raises to refuse it (on all ranks alike).
        capacity: completions that an engine decodes at once; what does not fit at the start goes to whichever engine
            has room, if all can take requests while others run. None: engines answer what they were dealt, as the
            shards of one engine must.
    """

    def __init__(
        self,
        placement: Placement,
        engine: Engine | None,
        collectives: Collectives,
        check_prompt: Callable[[int, str], None] = lambda length, where: None,
        capacity: int | None = None,
    ) -> None:
        self._placement = placement
        self._engine = engine
        self._shard = placement.shard_of(collectives.rank)
        self._collectives = collectives
        self._check_prompt = check_prompt
        self._capacity: int | None = None
        self.expected = ExpectedLengths()
        self._number = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._claims_folder: Path | None = None
        if (engine is None) != (self._shard is None):
            raise EngineError(f"rank {collectives.rank}: engine {engine!r} does not match placement {self._shard!r}.")
        if capacity is not None and placement.num_engines > 1:
            self._share_work(capacity)

    def _share_work(self, capacity: int) -> None:
        """Lets engines take from each other, if all of them can take requests while others run."""
        if self._collectives.rank == 0:
            self._folder = tempfile.TemporaryDirectory(prefix="colocate_rl_claims_")
        able = self._engine is None or isinstance(self._engine, Background | Incremental)
        told = self._collectives.gather_objects((able, None if self._folder is None else self._folder.name))
        if all(rank_able for rank_able, _ in told):
            self._capacity = capacity
            self._claims_folder = Path(told[0][1])

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
        copies = [group.num_copies for group in groups]
        dealt = plan(copies, self.expected.costs(groups), self._placement.num_engines, self._capacity)
        positions = [] if self._shard is None else dealt.of(self._shard.engine)
        work = Work(
            [_request(groups, dealt.parts[position], seed) for position in positions],
            0 if self._shard is None else len(dealt.own[self._shard.engine]),
            self._next_claims() if dealt.common else None,
        )
        with self._collectives.failing_together("handing prompts to the engines"):
            if work.requests and isinstance(self._engine, Background):
                self._engine.begin(work, sampling)
        return Pending(
            list(prompts),
            first_copy,
            groups,
            dealt,
            work,
            positions,
            sampling,
            policy_version,
            missing=copies,
            answered=[[] for _ in range(self._placement.num_engines)],
        )

    def poll(self, pending: Pending, timeout_s: float) -> list[int]:
        """Exchanges what engines in the background have finished; all ranks must call it together.

        Args:
            pending: begun, and not whole yet.
            timeout_s: how long to wait where nothing has finished.

        Returns:
            Positions of the groups that have become whole by it, the same on all ranks.
        """
        answers: list[Answer] = []
        with self._collectives.failing_together("generating completions"):
            if isinstance(self._engine, Background) and pending.work.requests:
                answers = _checked(self._engine.poll(timeout_s), pending)
        before = list(pending.missing)
        self._exchange(answers, pending)
        return [group for group, count in enumerate(before) if count and not pending.missing[group]]

    def finish(self, pending: Pending) -> tuple[list[list[Completion]], list[EngineStats]]:
        """Brings every completion back to the rank that asked for it; all ranks must call it, once for each begin.

        Returns:
            The completions of each of this rank's prompts, in order, and one record per engine.
        """
        answers: list[Answer] = []
        now = time.monotonic()
        span = Span(now, now)
        with self._collectives.failing_together("generating completions"):
            if self._engine is not None and pending.work.requests:
                answers, span = _answer(self._engine, pending)
                answers = _checked(answers, pending)
        self._exchange(answers, pending)
        with self._collectives.failing_together("collecting completions"):
            lost = sum(pending.missing)
            if lost:
                raise EngineError(f"{lost} of {sum(g.num_copies for g in pending.groups)} completions never came.")
        for group in pending.groups:
            copies = range(group.num_copies)
            self.expected.note(group.index, [len(pending.completions[group.index, c].token_ids) for c in copies])
        spans = self._collectives.gather_ragged(torch.tensor([[span.start, span.end]], dtype=torch.float64))
        stats = []
        in_order = _tokens_in_order(pending)
        for engine, parts in enumerate(pending.answered):
            start, end = spans[self._placement.host_of(engine)][0].tolist()
            tokens = _num_tokens(parts, pending)
            spans_of = (Span(start, end),) if parts else ()
            stats.append(EngineStats(engine, len(parts), tokens, end - start, spans_of, in_order[engine]))
        return pending.rows(list(zip(pending.prompts, pending.first_copy, strict=True))), stats

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec,
        seed: int | None = None,
        policy_version: int = 0,
    ) -> tuple[list[list[Completion]], list[EngineStats]]:
        """:meth:`begin` and :meth:`finish` in one call."""
        return self.finish(self.begin(prompts, sampling, policy_version=policy_version, seed=seed))

    @contextlib.contextmanager
    def other_prompts(self) -> Iterator[None]:
        """Inside, indices name other prompts than the training set's: lengths of their completions are forgotten."""
        expected, self.expected = self.expected, ExpectedLengths()
        try:
            yield
        finally:
            self.expected = expected

    def _next_claims(self) -> FileClaims:
        """A counter for this batch; that of the last one, whose engines have all finished, is removed."""
        assert self._claims_folder is not None
        self._number += 1
        if self._folder is not None:
            for name in (f"{self._number - 1}", f"{self._number - 1}.lock"):
                (self._claims_folder / name).unlink(missing_ok=True)
        return FileClaims(self._claims_folder / str(self._number))

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

    def _exchange(self, answers: Sequence[Answer], pending: Pending) -> None:
        """Shares every engine's completions with all ranks, as flat tensors."""
        speaks = self._shard is not None and self._shard.index == 0
        flat = [(position, completion) for position, part in answers for completion in part] if speaks else []
        heads = torch.tensor(
            [[position, len(c.token_ids), _FINISH_REASONS.index(c.finish_reason)] for position, c in flat],
            dtype=torch.int64,
        )
        gather = self._collectives.gather_ragged
        all_heads = gather(heads.view(-1, 3))
        if not any(len(rank_heads) for rank_heads in all_heads):
            return
        all_ids = gather(torch.from_numpy(_joined([c.token_ids for _, c in flat], np.int64)))
        all_logprobs = gather(torch.from_numpy(_joined([c.sampling_logprobs for _, c in flat], np.float32)))
        for engine in range(self._placement.num_engines):
            rank = self._placement.host_of(engine)
            tokens, values = all_ids[rank].tolist(), all_logprobs[rank].tolist()
            copy, place = 0, 0
            for position, length, reason in all_heads[rank].tolist():
                part = pending.plan.parts[position]
                group = pending.groups[part.group]
                span = slice(place, place + length)
                pending.completions[group.index, part.first_copy + copy] = Completion(
                    tokens[span], values[span], _FINISH_REASONS[reason], pending.policy_version
                )
                pending.missing[part.group] -= 1
                place += length
                copy += 1
                if copy == part.num_copies:
                    pending.answered[engine].append(part)
                    copy = 0


def _answer(engine: Engine, pending: Pending) -> tuple[list[Answer], Span]:
    """The answers that no poll has given, and when the engine worked."""
    if isinstance(engine, Background):
        return engine.finish()
    answers: list[Answer] = []
    start = time.monotonic()
    if isinstance(engine, Incremental):
        engine.work_off(pending.work, pending.sampling, lambda *answer: answers.append(answer))
    else:
        answers = list(enumerate(engine.generate(pending.work.requests, pending.sampling)))
        if len(answers) != len(pending.work.requests):
            raise EngineError(f"the engine was asked for {len(pending.work.requests)} prompts and gave {len(answers)}.")
    return answers, Span(start, time.monotonic())


def _checked(answers: Sequence[Answer], pending: Pending) -> list[Answer]:
    """The same with positions in the plan, when every prompt has what it was asked for.

    Raises:
        EngineError: when completions or log-probabilities are missing.
    """
    for request, completions in answers:
        wanted = pending.work.requests[request].num_completions
        if len(completions) != wanted:
            raise EngineError(f"the engine was asked for {wanted} completions of a prompt and gave {len(completions)}.")
        for completion in completions:
            if len(completion.token_ids) != len(completion.sampling_logprobs):
                raise EngineError(
                    f"the engine gave {len(completion.token_ids)} token ids but "
                    f"{len(completion.sampling_logprobs)} log-probabilities for one completion."
                )
    return [(pending.positions[request], completions) for request, completions in answers]


def _num_tokens(parts: Sequence[Part], pending: Pending) -> int:
    """Sampled tokens of some parts."""
    return sum(
        len(pending.completions[pending.groups[part.group].index, part.first_copy + copy].token_ids)
        for part in parts
        for copy in range(part.num_copies)
    )


def _tokens_in_order(pending: Pending) -> list[int]:
    """Sampled tokens of each engine, had it been given consecutive rows."""
    rows = [(group.index, copy) for group in pending.groups for copy in range(group.num_copies)]
    spans = split_evenly(len(rows), len(pending.answered))
    return [sum(len(pending.completions[rows[place]].token_ids) for place in span) for span in spans]


def _request(groups: Sequence[Group], part: Part, seed: int | None) -> Request:
    group = groups[part.group]
    own = None if seed is None else request_seed(seed, group.index) + part.first_copy
    return Request(group.token_ids, part.num_copies, own)


def _joined(lists: Sequence[Sequence[int] | Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists]) if lists else np.zeros(0, dtype)


def request_seed(seed: int, index: int) -> int:
    """A seed for the first copy of a prompt: fixed by the rollout's seed and the prompt's index, 2**20 apart."""
    return zlib.crc32(f"{seed}/{index}".encode()) << 20
