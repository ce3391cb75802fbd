"""The slices that a run trains on, in turn: generation batches are made, logged, cut, and used as often as wanted."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.positions import Positions
from colocate_rl.resume import RolloutState
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.rollout.resample import Resampler
from colocate_rl.rollout.stages import Answered, Row, Scored
from colocate_rl.runlog import RunLog
from colocate_rl.schedule import Schedule, Streamed
from colocate_rl.streaming import StreamedBatch, Streamer
from colocate_rl.training.fixed import FixedLogprobs
from colocate_rl.training.objective import Objective
from colocate_rl.training.passes import Runner
from colocate_rl.wiring import Wired

Spares = Callable[[int], Iterable[Row]]
"""Rows of prompts that are not in a generation batch, by its number."""


class Slices:
    """Gives out this rank's slices and computes their losses; every rank calls it alike.

    Args:
        args: the run's configuration.
        wired: what generates.
        schedule: when it does.
        objective: computes losses.
        fixed: adds what of the log-probabilities stays.
        collectives: of the training ranks.
        log: takes the figures.
    """

    def __init__(
        self,
        args: GRPOConfig,
        wired: Wired,
        schedule: Schedule,
        objective: Objective,
        fixed: FixedLogprobs,
        collectives: Collectives,
        log: RunLog,
    ) -> None:
        assert args.steps_per_generation is not None
        self._positions = Positions(
            args.steps_per_generation, args.micro_batches_per_rollout, args.gradient_accumulation_steps
        )
        self._args = args
        self._wired = wired
        self._schedule = schedule
        self._objective = objective
        self._fixed = fixed
        self._collectives = collectives
        self._log = log
        self._tokens_per_slice = self._most_tokens_per_slice
        self._held: list[RolloutBatch] = []
        """Those of the generation batch in use."""
        self._streamed: StreamedBatch | None = None
        self._streamer: Streamer | None = None
        if isinstance(schedule, Streamed):
            self._streamer = Streamer(
                schedule, wired.rollout, objective, fixed, collectives, log.metrics, args.steps_per_generation
            )
        self._resampler: Resampler | None = None
        if args.dynamic_sampling:
            self._resampler = Resampler(
                collectives,
                wired.rollout.rewards.weights,
                args.max_resample_tries,
                aggregation=args.multi_objective_aggregation,
            )

    @property
    def _most_tokens_per_slice(self) -> float:
        return float(self._args.per_device_train_batch_size * self._args.max_completion_length)

    def next(self, rows: list[Row], spares: Spares, trainer_state: Any) -> tuple[int, RolloutBatch | list[Row]]:
        """The slice to train on now, for :meth:`loss`; generates when the last generation batch is used up.

        Args:
            rows: this rank's of the generation batch in use, or to come.
            spares: replace groups that teach nothing.
            trainer_state: its ``global_step`` is the policy's version; counts the tokens of rollouts; handed to the
                reward functions.

        Returns:
            Number of the slice and the slice, or ``rows`` where they are generated while they are trained.
        """
        number = self._positions.slice
        streams = self._streamer is not None and self._positions.is_first_iteration
        if not streams and (self._positions.opens_batch or not self._held):
            self._held = self.roll_out(rows, spares, trainer_state)
        self._positions.advance()
        return number, rows if streams else self._held[number].to(self._args.device)

    def roll_out(self, rows: list[Row], spares: Spares, trainer_state: Any) -> list[RolloutBatch]:
        """A whole generation batch, cut into slices; see :meth:`next`."""
        number, version, metrics = self._positions.batch, trainer_state.global_step, self._log.metrics
        rollout = self._wired.rollout
        answered = self._schedule.next(number, rows, version)
        rated = rollout.rate(answered, metrics, trainer_state=trainer_state)
        if self._resampler is not None:
            seed = self._wired.streams.request_seed(number)
            ask = partial(
                rollout.sample, metrics=metrics, trainer_state=trainer_state, seed=seed, policy_version=version
            )
            rated, dropped = self._resampler.refill(rated, spares(number), ask, metrics)
            for part in dropped:
                self._log.note_rewards(version, part.answered.rows, part.rewards, trained=False)
        scored, batch = rollout.finish(rated, metrics, to_train=True)
        counts = torch.stack([batch.attention_mask.sum(), batch.loss_mask.sum()])
        self._note(rated.answered, scored, counts, trainer_state)
        slices = batch.rows(self._order(batch.num_rows, number)).split(self._positions.num_slices)
        return [
            self._fixed.add(part, policy_moves=self._positions.moves_before(place)) for place, part in enumerate(slices)
        ]

    def loss(self, runner: Runner, number: int, batch: RolloutBatch | list[Row], trainer_state: Any) -> torch.Tensor:
        """The loss of a slice that :meth:`next` gave; the backward passes of all but its last pass have been run."""
        if isinstance(batch, list):
            return self._streamed_loss(runner, number, batch, trainer_state)
        loss, logprobs = self._objective.loss(
            runner.model, runner.policy, batch, self._tokens_per_slice, self._log.metrics, runner.early
        )
        if batch.old_logprobs is None and self._args.num_iterations > 1:
            self._held[number] = self._held[number].with_logprobs(old_logprobs=logprobs.cpu())
        return loss

    def _streamed_loss(self, runner: Runner, number: int, rows: list[Row], trainer_state: Any) -> torch.Tensor:
        """Generates and trains on a batch's first turn, takes its last pass on the last; nothing is left between."""
        if number == 0:
            assert self._streamer is not None
            batch = self._positions.batch_under_way
            order = self._order(len(rows), batch)
            self._streamed = self._streamer.train(batch, rows, order, trainer_state, runner, self._tokens_per_slice)
        if number + 1 < self._positions.num_slices:
            return torch.zeros((), device=self._args.device, requires_grad=True)
        assert self._streamed is not None
        streamed, self._streamed = self._streamed, None
        self._note(streamed.answered, streamed.scored, streamed.passes.counts, trainer_state)
        loss = streamed.passes.finish(self._tokens_per_slice)
        if self._args.num_iterations > 1:
            self._held = streamed.passes.slices()
        return loss

    def _order(self, num_rows: int, number: int) -> list[int]:
        """Shuffled where several optimizer steps share the rows; one step sees them all, groups stay together."""
        if not self._positions.several_updates:
            return list(range(num_rows))
        return self._wired.streams.order(num_rows, number)

    def _note(self, answered: Answered, scored: Scored, counts: torch.Tensor, trainer_state: Any) -> None:
        """Logs a generation batch, of which this rank trains ``counts``: int64 [2], tokens and tokens in the loss."""
        tokens, loss_tokens = self._collectives.sum(counts).tolist()
        trainer_state.num_input_tokens_seen += tokens
        self._tokens_per_slice = loss_tokens / self._collectives.world_size / self._positions.num_slices
        self._log.note_tokens(trainer_state.num_input_tokens_seen)
        self._log.note_rollout(trainer_state.global_step, answered, scored, self._wired.rollout.codec)

    def end_step(self) -> None:
        """An optimizer step has ended."""
        self._positions.end_step()

    def resume_at(self, micro_step: int) -> None:
        """A run begins, or goes on, after so many micro-steps; what an earlier one held and learned is dropped.

        Lengths too: they decide which engine answers which prompt, and with that what is sampled.
        """
        self._positions.resume_at(micro_step)
        self._held, self._streamed, self._tokens_per_slice = [], None, self._most_tokens_per_slice
        self._schedule.forget()
        self._wired.generator.expected.take({})

    def hold(self) -> RolloutState:
        """What a checkpoint needs, between two optimizer steps."""
        return RolloutState(
            self._positions.micro_step,
            self._tokens_per_slice,
            [] if self._positions.opens_batch else self._held,
            self._schedule.hold(),
            self._wired.generator.expected.known,
        )

    def take(self, state: RolloutState) -> None:
        """Goes on with what another process's :meth:`hold` gave, after :meth:`resume_at`."""
        self._held, self._tokens_per_slice = state.slices, state.tokens_per_slice
        self._wired.generator.expected.take(state.lengths)
        self._schedule.take(state.ahead)
