"""From a slice of a rollout to its loss, and the figures that say how the update went."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from colocate_rl.metrics import MetricBuffer
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.aggregation import SliceSize
from colocate_rl.training.figures import note_update
from colocate_rl.training.logprobs import PassExtras, TokenStatistics, completion_statistics
from colocate_rl.training.losses import LossInputs, LossSettings, grpo_loss, mean_entropy
from colocate_rl.training.moving import EntropyBonus
from colocate_rl.training.packing import fill, prompt_owners
from colocate_rl.training.routers import RouterLoad, RouterLoss, balance_loss
from colocate_rl.training.selection import EntropySelection

EarlyBackward = Callable[[], AbstractContextManager[Callable[[torch.Tensor], None]]]
"""Makes the context of a micro-batch that is not the last of its slice; inside, the function runs a backward pass."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes log-probabilities and losses with one set of settings."""

    settings: LossSettings
    temperature: float
    chunk: int
    autocast: Callable[[], Any]
    """Makes the mixed-precision context of a forward pass."""
    packed: bool = False
    """Whether rows pass through the models without padding."""
    compiled: bool = False
    """Whether layers and head run compiled."""
    max_tokens: int | None = None
    """Most tokens of a micro-batch (with their padding, where there is any); None: no limit."""
    selection: EntropySelection | None = None
    """Which tokens the policy loss and the entropy bonus are about; None: all of them."""
    bonus: EntropyBonus | None = None
    """Weighs an entropy bonus; None: there is none."""
    router: RouterLoss | None = None
    """Balances the experts of the policy; None: it has none, or they are left alone."""
    fp32_head: bool = False
    """Whether output heads compute in float32 whatever the rest computes in."""

    def statistics(
        self, wrapper: nn.Module, policy: nn.Module, batch: RolloutBatch, *, with_router: bool = False
    ) -> TokenStatistics:
        """Log-probabilities and entropies (with gradient); see :func:`completion_statistics`."""
        return completion_statistics(
            wrapper,
            policy,
            batch,
            temperature=self.temperature,
            chunk=self.chunk,
            autocast=self.autocast,
            packed=self.packed,
            extras=PassExtras(
                compiled=self.compiled,
                fp32_head=self.fp32_head,
                experts_per_token=self.router.experts_per_token if self.router is not None and with_router else None,
            ),
        )

    def micro_batches(self, batch: RolloutBatch) -> list[list[int]]:
        """Cuts a slice into row numbers of micro-batches of at most ``max_tokens`` tokens."""
        if self.max_tokens is None:
            return [list(range(batch.num_rows))] if batch.num_rows else []
        lengths = batch.attention_mask.sum(1)
        prompts = None
        if self.packed and batch.num_rows:
            owner, prompt = prompt_owners(batch)
            prompts = list(zip(owner.tolist(), prompt.sum(1).tolist(), strict=True))
        return fill(lengths.tolist(), self.max_tokens, padded=not self.packed, prompts=prompts)

    def logprobs(self, model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
        """Log-probabilities float32 [B, T] without gradient or dropout, a micro-batch at a time."""
        return self._fixed_statistics(model, batch).logprobs

    def _fixed_statistics(self, model: nn.Module, batch: RolloutBatch, *, with_router: bool = False) -> TokenStatistics:
        device = next(model.parameters()).device
        shape = batch.input_ids.shape
        logprobs, entropy = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        load: RouterLoad | None = None
        was_training = model.training
        model.eval()  # the engine, which these are compared with, knows no dropout
        try:
            with torch.no_grad():
                for rows in self.micro_batches(batch):
                    found = self.statistics(model, model, batch.rows(rows).to(device), with_router=with_router)
                    logprobs[rows, : found.logprobs.shape[1]] = found.logprobs
                    entropy[rows, : found.entropy.shape[1]] = found.entropy
                    if found.router is not None:
                        load = found.router if load is None else load + found.router
        finally:
            model.train(was_training)
        return TokenStatistics(logprobs, entropy, load)

    def loss(
        self,
        wrapper: nn.Module,
        policy: nn.Module,
        batch: RolloutBatch,
        tokens_per_slice: float,
        metrics: MetricBuffer,
        early: EarlyBackward | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a slice, and its log-probabilities (detached, float32 [B, T]).

        Where the batch has no old log-probabilities the live ones stand for them: the ratio is then exactly 1. With a
        selection by entropy every rank must call this for its slice at the same time, be it empty.

        Args:
            wrapper: the policy as the trainer wrapped it, or the policy itself.
            policy: the causal language model inside.
            batch: the slice, on the policy's device.
            tokens_per_slice: see :func:`grpo_loss`.
            metrics: takes the figures of the update.
            early: runs the backward passes of all micro-batches but the last, whose activations then never exist side
                by side. The loss has the value of the whole slice and the gradient of the last micro-batch. None:
                nothing is run, as in evaluation, and the entropy bonus does not adapt to what it sees.
        """
        groups = self.micro_batches(batch)
        current = _Slice(tokens_per_slice, SliceSize(batch.num_rows, batch.loss_mask.sum()), metrics, early is not None)
        looks_ahead = self.selection is not None or self.router is not None
        if looks_ahead and (self.max_tokens is not None or not groups):
            ahead = self._fixed_statistics(policy, batch, with_router=True)
            current.load = ahead.router
            if self.selection is not None:
                current.select(self.selection, ahead.entropy, batch.loss_mask)
        logprobs = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
        total = torch.zeros((), device=batch.input_ids.device)
        for number, rows in enumerate(groups):
            part = batch.rows(rows) if len(groups) > 1 else batch
            if early is None or number == len(groups) - 1:
                loss, found = self._micro_batch_loss(wrapper, policy, part, rows, current)
            else:
                with early() as backward:
                    loss, found = self._micro_batch_loss(wrapper, policy, part, rows, current)
                    backward(loss)
                loss = loss.detach()
            total = total + loss
            logprobs[rows, : found.shape[1]] = found
        num_rows = torch.full_like(current.policy_loss, batch.num_rows)
        if self.bonus is not None:
            metrics.share("policy_loss", current.policy_loss * num_rows, num_rows)
        if self.router is not None:
            metrics.share("aux_loss", current.balance_loss * num_rows, num_rows)
        return total, logprobs

    def part_loss(
        self,
        wrapper: nn.Module,
        policy: nn.Module,
        batch: RolloutBatch,
        tokens_per_slice: float,
        whole: SliceSize,
        metrics: MetricBuffer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What one forward pass over some rows adds to the policy loss of their slice, and their log-probabilities.

        Nothing is looked up ahead in the slice, so there must be no selection, bonus or router.

        Args:
            wrapper: the policy as the trainer wrapped it, or the policy itself.
            policy: the causal language model inside.
            batch: the rows, on the policy's device.
            tokens_per_slice: see :func:`grpo_loss`.
            whole: size of the slice that the rows belong to.
            metrics: takes the figures of the update.
        """
        assert self.selection is None
        assert self.bonus is None
        assert self.router is None
        current = _Slice(tokens_per_slice, whole, metrics, is_training=True)
        return self._micro_batch_loss(wrapper, policy, batch, list(range(batch.num_rows)), current)

    def _micro_batch_loss(
        self, wrapper: nn.Module, policy: nn.Module, batch: RolloutBatch, rows: list[int], current: "_Slice"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        live = self.statistics(wrapper, policy, batch, with_router=True)
        detached = live.logprobs.detach()
        if self.selection is not None and current.selected is None:  # this micro-batch is its whole slice
            current.select(self.selection, live.entropy, batch.loss_mask)
        selected = None if current.selected is None else current.selected[rows, : detached.shape[1]]
        inputs = LossInputs(
            policy_logprobs=live.logprobs,
            old_logprobs=batch.old_logprobs if batch.old_logprobs is not None else detached,
            sampling_logprobs=batch.sampling_logprobs,
            ref_logprobs=batch.ref_logprobs,
            mask=batch.loss_mask,
            advantages=batch.advantages,
            selected=selected,
        )
        output = grpo_loss(inputs, self.settings, current.tokens_per_slice, current.size)
        current.policy_loss = current.policy_loss + output.loss.detach()
        note_update(current.metrics, self.settings, inputs, output, live.entropy.detach())
        chosen = batch.loss_mask if selected is None else selected
        return output.loss + self._regularisation(live, chosen, current), detached

    def _regularisation(self, live: TokenStatistics, chosen: torch.Tensor, current: "_Slice") -> torch.Tensor | float:
        """What is added to the policy loss: minus the entropy bonus, plus the load balancing of experts."""
        added: torch.Tensor | float = 0.0
        if self.bonus is not None:
            if current.is_training:
                self.bonus.observe(live.entropy, chosen)
            if self.bonus.applied != 0.0:
                added = added - self.bonus.applied * mean_entropy(live.entropy, chosen, current.num_chosen)
        if self.router is not None:
            assert live.router is not None
            balance = balance_loss(live.router, current.load if current.load is not None else live.router)
            current.balance_loss = current.balance_loss + balance.detach()
            added = added + self.router.weight * balance
        return added


@dataclass(slots=True)
class _Slice:
    """What the micro-batches of a slice share."""

    tokens_per_slice: float
    size: SliceSize
    metrics: MetricBuffer
    is_training: bool
    selected: torch.Tensor | None = None
    """bool [B, T], where tokens are selected by their entropy."""
    load: RouterLoad | None = None
    """Of the whole slice, where it has been found ahead."""
    num_chosen: torch.Tensor = field(init=False)
    """Scalar: tokens that the policy loss is about."""
    policy_loss: torch.Tensor = field(init=False)
    """Scalar: of the micro-batches so far, without what is added to it."""
    balance_loss: torch.Tensor = field(init=False)
    """Scalar: of the micro-batches so far."""

    def __post_init__(self) -> None:
        self.num_chosen = self.size.tokens
        self.policy_loss = torch.zeros((), device=self.size.tokens.device)
        self.balance_loss = torch.zeros_like(self.policy_loss)

    def select(self, selection: EntropySelection, entropy: torch.Tensor, mask: torch.Tensor) -> None:
        self.selected = selection.select(entropy, mask)
        self.num_chosen = self.selected.sum()
