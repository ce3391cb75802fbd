"""Training a generation batch while it is generated (``overlap="stream"``), strictly on-policy.

Groups that are whole are scored and trained while the engines, in child processes of their ranks, generate the others;
the optimizer step comes when all have been trained, so every completion is of the version that it updates, and the
gradient is that of ``overlap="none"``.

What it can give. With G seconds of generation and R of training a step takes at least max(G, R), and G + R without
overlap. What can overlap is the time between the first and the last group's end: a batch whose groups all end at once
(equal lengths, all decoded side by side) does not overlap at all. Decoding in w waves (``vllm_max_num_seqs`` at 1/w of
an engine's share) makes groups end earlier, but each decode step has a fixed part: with a step of n completions taking
a + b n seconds, L tokens each and N completions, w waves take L (w a + b N), and the step the longer of L (w a + b N) +
R / w, where generation sets the pace, and L (a + b N / w) + R, where training does. For instance 256 completions of 512
tokens by a 1.5 B model on an H200, where 256 sequences take 4.0 ms a decode step and 1,024 take 10.9 ms
(``benchmarks/results/generation_h200.json``): then a is about 1.7 ms, L a = 0.9 s and L b N = 1.2 s, and with R = 3.5 s
the step would take 5.6 s with one wave, 5.0 s with two or three, 5.7 s with four, so waves gain a tenth and max(G, R)
is far, whatever w; ``overlap="one_step"`` is for such work, at the price of data one version old. Lengths with a long
tail overlap by themselves, since the few long groups, started first, decode while the others are trained: so the
default starts everything at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.collect import Rollout
from colocate_rl.rollout.stages import Answered, Row, Scored
from colocate_rl.rollout.stream import Stream
from colocate_rl.schedule import Streamed
from colocate_rl.training.fixed import FixedLogprobs
from colocate_rl.training.objective import Objective
from colocate_rl.training.passes import Passes, Runner


@dataclass(frozen=True, slots=True)
class Streamer:
    """What every streamed generation batch of a run needs."""

    schedule: Streamed
    rollout: Rollout
    objective: Objective
    fixed: FixedLogprobs
    collectives: Collectives
    metrics: MetricBuffer
    num_slices: int
    """Slices of a generation batch on each rank."""

    def train(
        self,
        number: int,
        rows: Sequence[Row],
        order: Sequence[int],
        trainer_state: Any,
        runner: Runner,
        expected_tokens: float,
    ) -> "StreamedBatch":
        """Generates and trains a generation batch, but for its last pass; every rank must call it.

        Args:
            number: of the generation batch.
            rows: this rank's.
            order: of the rows, to be cut into the slices that a batch that came at once would have.
            trainer_state: its ``global_step`` is the policy's version; handed to the reward functions.
            runner: runs passes.
            expected_tokens: see :class:`colocate_rl.training.passes.Passes`.
        """
        begun = self.schedule.begin(number, rows, trainer_state.global_step)
        ranks = self.collectives
        stream = Stream(self.rollout, begun, self.metrics, trainer_state, ranks.rank, ranks.world_size)
        size = len(rows) // self.num_slices
        slices = [order[start : start + size] for start in range(0, len(order), size)]
        passes = Passes(self.objective, runner, slices, expected_tokens, self.metrics)
        passes.open()
        for arrived in stream.rounds():
            batch = arrived.batch
            passes.add(self.fixed.add(batch) if batch.num_rows else batch, arrived.places)
        answered, scored = stream.finish()
        self.schedule.end()
        return StreamedBatch(answered, scored, passes)


@dataclass(frozen=True, slots=True)
class StreamedBatch:
    """A generation batch all of whose passes but the last have been run."""

    answered: Answered
    scored: Scored
    passes: Passes
