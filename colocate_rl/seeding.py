"""Chance in a run: streams that start anew with every generation batch, so that a batch can be repeated."""

import zlib

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Engine
from colocate_rl.engines import engine_seed
from colocate_rl.placement import Placement

_EVALUATION = -1
"""Stands for the number of a generation batch."""


class SamplingStreams:
    """Seeds of a run's samples, all of them functions of the run's seed and the number of the generation batch.

    What a generation batch samples thus depends on nothing that came before it: a resumed run and an unbroken one
    sample and order the same, and neither an evaluation nor :meth:`colocate_rl.GRPOTrainer.generate` in between shifts
    the training batches.

    Args:
        engine: the engine (or shard) of this rank, or None.
        placement: who hosts what.
        collectives: of the training ranks.
        run_seed: of the run.
        per_request: requests have seeds of their own, so that completions do not depend on the number of engines.
    """

    def __init__(
        self, engine: Engine | None, placement: Placement, collectives: Collectives, run_seed: int, per_request: bool
    ) -> None:
        self._engine = engine
        self._shard = placement.shard_of(collectives.rank)
        self._collectives = collectives
        self._run_seed = run_seed
        self._per_request = per_request

    def begin_batch(self, number: int) -> int | None:
        """Starts the streams of generation batch ``number``; every rank must call it, while the engines are free.

        Returns:
            See :meth:`request_seed`.
        """
        self._restart(number)
        return self.request_seed(number)

    def begin_evaluation(self) -> None:
        """Starts the streams of an evaluation, the same in each; every rank must call it, engines being free."""
        self._restart(_EVALUATION)

    def request_seed(self, number: int) -> int | None:
        """The seed from which those of generation batch ``number``'s requests derive; None: they have none."""
        return engine_seed(self._run_seed, -1, number) if self._per_request else None

    def evaluation_seed(self, number: int) -> int | None:
        """The same for the ``number``-th batch of an evaluation."""
        return engine_seed(self._run_seed, -2 - number, 0) if self._per_request else None

    def order(self, num_rows: int, number: int) -> list[int]:
        """A random order of this rank's rows of generation batch ``number``, always the same one."""
        seed = zlib.crc32(f"{self._run_seed}/order {self._collectives.rank}/{number}".encode())
        order: list[int] = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
        return order

    def _restart(self, number: int) -> None:
        with self._collectives.failing_together("seeding the engines"):
            if self._engine is not None and self._shard is not None:
                self._engine.reseed(engine_seed(self._run_seed, self._shard.engine, number))
