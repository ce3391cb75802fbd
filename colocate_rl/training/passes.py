"""An optimizer step whose rows come bit by bit: passes run as soon as there is something to run; the gradient is exact.

A pass adds sum_i w_i dL_i/dtheta to the gradient, where the weight w_i of a row is 1 over a denominator of its loss
type (:data:`colocate_rl.training.aggregation.DENOMINATORS`). Where it is a number of rows it is known before anything
is generated. Where it is the tokens of the slice, rows wait for their slice. Where it is the tokens of the generation
batch, passes divide by an estimate e; once the true number t is known the gradient so far is multiplied by e / t, and
only the last pass, which is held back until then, divides by t itself. The last pass is also the only one that reduces
gradients over ranks, so ranks may run different numbers of passes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.aggregation import DENOMINATORS, SliceSize
from colocate_rl.training.logprobs import through_wrapper
from colocate_rl.training.objective import Objective


@dataclass(frozen=True, slots=True)
class Runner:
    """How passes are run."""

    model: nn.Module
    """The policy as the trainer wrapped it."""
    policy: nn.Module
    """The causal language model inside."""
    device: torch.device
    backward: Callable[[torch.Tensor], None]
    """Runs a backward pass of a slice's (part of a) loss."""
    no_sync: Callable[[], AbstractContextManager[None]]
    """Makes the context of a pass that does not reduce gradients over ranks."""

    @contextlib.contextmanager
    def early(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """The context of a pass that another one follows: what runs its backward pass, without that reduction."""
        with self.no_sync():
            yield self.backward


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rows that pass through the policy together."""

    batch: RolloutBatch
    whole: SliceSize
    slice: int
    """Where rows wait for their slice: which one it is."""


class Passes:
    """The passes of one optimizer step on this rank.

    Args:
        objective: computes losses.
        runner: how passes are run.
        slices: this rank's places in the generation batch, slice by slice; slices have equal numbers of rows.
        expected_tokens: estimate of the tokens per slice; the closer, the less the gradient is rescaled.
        metrics: takes the figures of the update.
    """

    def __init__(
        self,
        objective: Objective,
        runner: Runner,
        slices: Sequence[Sequence[int]],
        expected_tokens: float,
        metrics: MetricBuffer,
    ) -> None:
        self._objective = objective
        self._runner = runner
        self._slices = slices
        self._rows_per_slice = len(slices[0])
        self._expected_tokens = max(expected_tokens, 1.0)
        self._metrics = metrics
        self._denominator = DENOMINATORS[objective.settings.loss_type]
        self._waiting: dict[int, RolloutBatch] = {}
        self._held: _Pass | None = None
        self._total = torch.zeros((), device=runner.device)
        self.counts = torch.zeros(2, dtype=torch.int64)
        """Tokens of the rows, and those of them in the loss."""
        self._trained: list[_Pass] = []

    def open(self) -> None:
        """To be called by all ranks before any pass: ranks run their first one at different times.

        DistributedDataParallel talks between ranks within the first forward pass after a gradient reduction (it sends
        buffers and rearranges gradient buckets); a pass of nothing has it done now.
        """
        runner = self._runner
        with runner.no_sync():
            through_wrapper(runner.model, runner.policy, self._total, lambda _: self._total)

    def add(self, batch: RolloutBatch, places: Sequence[int]) -> None:
        """Runs the passes of some rows, but for the last one.

        Args:
            batch: the rows, on the CPU.
            places: of them in this rank's generation batch; needed where rows wait for their slice.
        """
        self.counts += torch.stack([batch.attention_mask.sum(), batch.loss_mask.sum()])
        if self._denominator == "slice tokens":
            for row, place in enumerate(places):
                self._waiting[place] = batch.rows([row])
            for number in self._whole_slices():
                rows = RolloutBatch.joined([self._waiting.pop(place) for place in self._slices[number]])
                self._cut(rows, number)
        elif batch.num_rows:
            self._cut(batch, 0)

    def finish(self, tokens_per_slice: float) -> torch.Tensor:
        """The last pass, when every row has been added.

        Args:
            tokens_per_slice: see :func:`colocate_rl.training.losses.grpo_loss`.

        Returns:
            The sum of the losses of all slices, with the gradient of the last pass: the caller runs its backward pass.
        """
        assert self._held is not None
        assert not self._waiting
        factor = 1.0
        if self._denominator == "batch tokens":
            factor = self._expected_tokens / max(tokens_per_slice, 1.0)
            for parameter in self._runner.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        held, self._held = self._held, None
        return self._total * factor + self._loss(held, tokens_per_slice)

    def slices(self) -> list[RolloutBatch]:
        """The rows slice by slice, for further iterations; old log-probabilities are those of before the step."""
        if self._denominator != "slice tokens":
            return RolloutBatch.joined([done.batch for done in self._trained]).split(len(self._slices))
        return [
            RolloutBatch.joined([done.batch for done in self._trained if done.slice == number])
            for number in range(len(self._slices))
        ]

    def _whole_slices(self) -> list[int]:
        return [number for number, places in enumerate(self._slices) if self._waiting.keys() >= set(places)]

    def _cut(self, batch: RolloutBatch, number: int) -> None:
        """Into passes of at most as many tokens as are allowed, or as many rows as a slice has."""
        whole = SliceSize(self._rows_per_slice, batch.loss_mask.sum().to(self._runner.device))
        if self._objective.max_tokens is not None:
            chosen = self._objective.micro_batches(batch)
        else:
            order = list(range(batch.num_rows))
            if not self._objective.packed:  # rows of like length have little padding
                order = batch.attention_mask.sum(1).argsort(descending=True, stable=True).tolist()
            size = self._rows_per_slice
            chosen = [order[start : start + size] for start in range(0, len(order), size)]
        for rows in chosen:
            if self._held is not None:
                self._run_early(self._held)
            self._held = _Pass(batch.rows(rows), whole, number)

    def _run_early(self, early: "_Pass") -> None:
        with self._runner.early() as backward:
            loss = self._loss(early, self._expected_tokens)
            backward(loss)
        self._total = self._total + loss.detach()

    def _loss(self, one: "_Pass", tokens_per_slice: float) -> torch.Tensor:
        batch = one.batch.to(self._runner.device)
        loss, logprobs = self._objective.part_loss(
            self._runner.model, self._runner.policy, batch, tokens_per_slice, one.whole, self._metrics
        )
        old = logprobs.cpu() if batch.old_logprobs is None else None
        self._trained.append(replace(one, batch=one.batch.with_logprobs(old_logprobs=old)))
        return loss
