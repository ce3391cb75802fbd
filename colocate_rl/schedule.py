"""When engines generate and when ranks train: one after the other, side by side, or one batch ahead."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from colocate_rl.errors import EngineError, PeerError
from colocate_rl.metrics import PhaseClock
from colocate_rl.rollout.collect import Begun, Rollout
from colocate_rl.rollout.stages import Answered, Row
from colocate_rl.sync import WeightSync

Seed = Callable[[int], int | None]
"""Seed of a generation batch by its number; None: from the engines' own streams, which the call starts anew."""


class Schedule(Protocol):
    """Gives out answered generation batches; every rank calls it alike."""

    def next(self, number: int, rows: Sequence[Row], policy_version: int) -> Answered:
        """Completions for generation batch ``number``, whose rows on this rank are ``rows``."""
        ...

    def pause(self) -> None:
        """Leaves the engines free for something else (an evaluation) without losing what they were asked for."""
        ...

    def forget(self) -> None:
        """Leaves the engines free and drops what they were asked for: another run begins."""
        ...

    def hold(self) -> tuple[int, Answered] | None:
        """:meth:`pause`, and the generation batch that waits for its turn, with its number; it still gets it."""
        ...

    def take(self, ahead: tuple[int, Answered] | None) -> None:
        """Has what another process's :meth:`hold` gave wait for its turn."""
        ...


class _Start:
    """What every schedule begins a generation batch with.

    Args:
        rollout: reaches the engines.
        sync: keeps them on the policy's weights.
        clock: charges the phase "sync".
        seed: see :data:`Seed`.
    """

    def __init__(self, rollout: Rollout, sync: WeightSync, clock: PhaseClock, seed: Seed) -> None:
        self._rollout = rollout
        self._sync = sync
        self._clock = clock
        self._seed = seed

    def _start(self, number: int, rows: Sequence[Row], policy_version: int) -> Begun:
        """Has the engines start generation batch ``number`` with the policy's weights; every rank must call it."""
        with self._clock.phase("sync"):
            self._sync.sync(policy_version)
        return self._rollout.begin(rows, policy_version=policy_version, seed=self._seed(number))


class Synchronous(_Start):
    """Sync, generate, then train: the engines idle while ranks train."""

    def next(self, number: int, rows: Sequence[Row], policy_version: int) -> Answered:
        """See :meth:`Schedule.next`."""
        return self._rollout.wait(self._start(number, rows, policy_version))

    def pause(self) -> None:
        """Nothing is ever under way."""

    def forget(self) -> None:
        """Nothing is ever kept."""

    def hold(self) -> None:
        """Nothing ever waits."""

    def take(self, ahead: tuple[int, Answered] | None) -> None:
        """See :meth:`Schedule.take`."""
        assert ahead is None, "only a run with overlap='one_step' has a batch that waits, and only such a one takes it"


class Streamed(Synchronous):
    """Sync, generate, and train what has finished meanwhile: the engines work in the background.

    :meth:`next` is that of :class:`Synchronous`, for a generation batch that a resumed run finds half used.
    """

    _begun: Begun | None = None

    def begin(self, number: int, rows: Sequence[Row], policy_version: int) -> Begun:
        """Has the engines start generation batch ``number``; every rank must call it."""
        self._begun = self._start(number, rows, policy_version)
        return self._begun

    def end(self) -> None:
        """Says that all of the batch has come."""
        self._begun = None

    def forget(self) -> None:
        """Waits for what an interrupted run left under way, and drops it; it may be the engines' failure."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with contextlib.suppress(EngineError, PeerError):
                self._rollout.wait(begun)


class OneStepAhead(_Start):
    """Generates batch n+1, with the weights of before the update, while ranks train on batch n.

    The engines get new weights between two batches, when they are free: completions are never of mixed versions.

    Args:
        rollout, sync, clock, seed: as for :class:`_Start`; the engines answer in the background.
        rows_of: this rank's rows of any generation batch, or None past the last one that the run trains.
        max_staleness: versions the policy may be ahead of a completion.
    """

    def __init__(
        self,
        rollout: Rollout,
        sync: WeightSync,
        clock: PhaseClock,
        seed: Seed,
        rows_of: Callable[[int], Sequence[Row] | None],
        max_staleness: int,
    ) -> None:
        super().__init__(rollout, sync, clock, seed)
        self._rows_of = rows_of
        self._max_staleness = max_staleness
        self._ahead: tuple[int, Begun] | None = None
        self._ready: tuple[int, Answered] | None = None

    def next(self, number: int, rows: Sequence[Row], policy_version: int) -> Answered:
        """See :meth:`Schedule.next`.

        Raises:
            EngineError: for completions older than ``max_staleness``.
        """
        if not self._has(number):
            self.pause()
            self._ahead = (number, self._start(number, rows, policy_version))
        self.pause()
        assert self._ready is not None
        answered, self._ready = self._ready[1], None
        versions = {completion.policy_version for completion in answered.completions}
        if versions and policy_version - min(versions) > self._max_staleness:
            raise EngineError(
                f"completions of policy version {min(versions)} reached version {policy_version}, more than "
                f"max_staleness={self._max_staleness} later."
            )
        coming = self._rows_of(number + 1)
        if coming is not None:
            self._ahead = (number + 1, self._start(number + 1, coming, policy_version))
        return answered

    def pause(self) -> None:
        """Waits for what is under way, and keeps it for its turn."""
        if self._ahead is not None:
            number, begun = self._ahead
            self._ahead = None
            self._ready = (number, self._rollout.wait(begun))

    def forget(self) -> None:
        """Waits for what is under way, and drops it; it may be the engines' failure."""
        with contextlib.suppress(EngineError, PeerError):
            self.pause()
        self._ready = None

    def hold(self) -> tuple[int, Answered] | None:
        """See :meth:`Schedule.hold`."""
        self.pause()
        return self._ready

    def take(self, ahead: tuple[int, Answered] | None) -> None:
        """See :meth:`Schedule.take`."""
        self._ready = ahead

    def _has(self, number: int) -> bool:
        return number in [known[0] for known in (self._ahead, self._ready) if known is not None]
