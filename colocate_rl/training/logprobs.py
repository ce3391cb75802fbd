"""Per-token log-probabilities and entropy of a policy without ever holding its full logits.

The decoder runs once, on the padded rows or on the rows packed into one sequence; its hidden states are gathered at the
completion positions only, and the output head is applied to a chunk of them at a time (:mod:`.head`). Peak memory grows
with chunk x vocabulary, not with batch x length x vocabulary.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention, compiling
from colocate_rl.training.adapters import causal_lm
from colocate_rl.training.head import ChunkedStatistics, Head
from colocate_rl.training.packing import PackedRows
from colocate_rl.training.routers import RouterLoad, router_load

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What a policy says about each completion token; 0 elsewhere."""

    logprobs: torch.Tensor
    """float32 [B, T], of the token itself, under the temperature."""
    entropy: torch.Tensor
    """float32 [B, T], of the distribution it was drawn from, in nats; with gradient, which costs nothing unused."""
    router: RouterLoad | None = None
    """Of all tokens of the rows, where it was asked for."""


@dataclass(frozen=True, slots=True)
class PassExtras:
    """What a pass is asked for beyond the ordinary."""

    compiled: bool = False
    """Whether layers and head run compiled (see :mod:`.compiling`)."""
    experts_per_token: int | None = None
    """Of a mixture of experts whose router load is wanted; None: it is not."""
    fp32_head: bool = False
    """Whether the output head computes in float32 whatever the decoder computes in."""


NO_EXTRAS = PassExtras()


def completion_statistics(
    wrapper: nn.Module,
    policy: nn.Module,
    batch: RolloutBatch,
    *,
    temperature: float,
    chunk: int,
    autocast: Callable[[], Any],
    packed: bool = False,
    extras: PassExtras = NO_EXTRAS,
) -> TokenStatistics:
    """Log-probabilities and entropies of a batch's completion tokens.

    Args:
        wrapper: the policy as the trainer wrapped it (DistributedDataParallel, ...), or the policy itself.
        policy: the causal language model inside.
        batch: rows on the policy's device.
        temperature: divides the logits, as it did when the engine sampled.
        chunk: tokens whose logits exist at once.
        autocast: makes the mixed-precision context of the forward pass.
        packed: whether the rows pass through the decoder without padding (see :mod:`.packing`).
        extras: see :class:`PassExtras`.
    """
    experts_per_token = extras.experts_per_token
    wanted = {} if experts_per_token is None else {"output_router_logits": True}

    def compute(model: nn.Module) -> TokenStatistics:
        model = causal_lm(model)
        with autocast(), compiling.chosen(extras.compiled):
            states, output, num_holders = (_packed_states if packed else _padded_states)(model, batch, wanted)
            kind = states.device.type
            if extras.fp32_head:
                states = states.float()
            elif torch.is_autocast_enabled(kind):  # the last norm gives float32; the head computes in autocast's type
                states = states.to(torch.get_autocast_dtype(kind))
        chosen = batch.completion_mask[:, 1:]
        head = Head.of(model)
        targets = batch.input_ids[:, 1:][chosen]
        flat_logprobs, flat_entropy = ChunkedStatistics.apply(
            states, head.weight, head.bias, targets, head.curve(temperature), chunk, extras.compiled
        )
        shape = batch.input_ids.shape
        logprobs = torch.zeros(shape, device=states.device)
        logprobs[:, 1:] = logprobs[:, 1:].masked_scatter(chosen, flat_logprobs)
        entropy = torch.zeros(shape, device=states.device)
        entropy[:, 1:] = entropy[:, 1:].masked_scatter(chosen, flat_entropy)
        if experts_per_token is None:
            return TokenStatistics(logprobs, entropy)
        return TokenStatistics(logprobs, entropy, router_load(output.router_logits, num_holders, experts_per_token))

    return through_wrapper(wrapper, policy, batch.input_ids, compute)


def _decoder(model: nn.Module) -> Any:
    return model.base_model if hasattr(model, "base_model_prefix") else model


def _padded_states(
    model: nn.Module, batch: RolloutBatch, wanted: dict[str, bool]
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Hidden states [n, H] that predict the completion tokens, row by row; all that the decoder gave; and how many
    rows hold each token that went through it (padding: none).
    """
    output = _decoder(model)(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **wanted)
    return output.last_hidden_state[:, :-1][batch.completion_mask[:, 1:]], output, batch.attention_mask


def _packed_states(
    model: nn.Module, batch: RolloutBatch, wanted: dict[str, bool]
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """The same from a pass without padding."""
    rows = PackedRows.of(batch)
    attention.check_installed(model)
    output = _decoder(model)(**rows.arguments(), use_cache=False, **wanted)
    return output.last_hidden_state[0][rows.predictors], output, rows.num_holders()


def through_wrapper(
    wrapper: nn.Module, policy: nn.Module, inputs: torch.Tensor, function: Callable[[nn.Module], Result]
) -> Result:
    """Runs ``function(policy)`` as the forward pass of ``wrapper``, so that its hooks (gradient reduction) take part.

    A wrapper such as DistributedDataParallel only knows ``forward``; for the length of one call the policy's is ours.
    It is given ``inputs``, which nobody reads: on a GPU DistributedDataParallel fails without any.
    """
    if wrapper is policy:
        return function(policy)
    original = policy.__dict__.get("forward")

    def forward(self: nn.Module, _: torch.Tensor) -> Result:
        _restore_forward(policy, original)
        return function(self)

    policy.forward = types.MethodType(forward, policy)
    try:
        result: Result = wrapper(inputs)
        return result
    finally:
        _restore_forward(policy, original)


def _restore_forward(policy: nn.Module, original: Any) -> None:
    policy.__dict__.pop("forward", None)
    if original is not None:
        policy.__dict__["forward"] = original
