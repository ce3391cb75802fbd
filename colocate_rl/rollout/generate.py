"""All ranks' prompts to all engines, and every completion back to the rows that asked for it.

Every rank runs the same code: gather the unique prompts, deal them to the engines, let the engine it hosts (if any)
work its share off, exchange the completions, pick its own. Rows are found by the index they carry, never by their text.
"""

import contextlib
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.claims import FileClaims
from colocate_rl.engine.protocol import (
    Background,
    Completion,
    Engine,
    Incremental,
    Request,
    SamplingSpec,
    Span,
    Work,
)
from colocate_rl.errors import EngineError
from colocate_rl.placement import Placement
from colocate_rl.rollout.exchange import Answer, gather_answers, gather_groups
from colocate_rl.rollout.handout import ExpectedLengths, Group, Part, plan
from colocate_rl.rollout.pending import Pending
from colocate_rl.rollout.records import EngineStats, Prompt


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
        groups, first_copy = gather_groups(self._collectives, prompts)
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
                answers = pending.checked(self._engine.poll(timeout_s))
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
                answers = pending.checked(answers)
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
        in_order = pending.tokens_in_order()
        for engine, parts in enumerate(pending.answered):
            start, end = spans[self._placement.host_of(engine)][0].tolist()
            tokens = pending.num_tokens(engine)
            spans_of = (Span(start, end),) if parts else ()
            stats.append(EngineStats(engine, len(parts), tokens, end - start, spans_of, in_order[engine]))
        return pending.rows(pending.mine()), stats

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

    def _exchange(self, answers: Sequence[Answer], pending: Pending) -> None:
        """Shares every engine's completions with all ranks."""
        speaks = self._shard is not None and self._shard.index == 0
        told = gather_answers(self._collectives, answers if speaks else [], pending.policy_version)
        for engine in range(self._placement.num_engines):
            pending.take(engine, told[self._placement.host_of(engine)])


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


def _request(groups: Sequence[Group], part: Part, seed: int | None) -> Request:
    group = groups[part.group]
    own = None if seed is None else request_seed(seed, group.index) + part.first_copy
    return Request(group.token_ids, part.num_copies, own)


def request_seed(seed: int, index: int) -> int:
    """A seed for the first copy of a prompt: fixed by the rollout's seed and the prompt's index, 2**20 apart."""
    return zlib.crc32(f"{seed}/{index}".encode()) << 20
