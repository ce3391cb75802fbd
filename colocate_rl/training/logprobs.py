"""Per-token log-probabilities and entropy of a policy without ever holding its full logits.

The decoder runs once, on the padded rows or on the rows packed into one sequence; its hidden states are gathered at the
completion positions only, and the output head is applied to a chunk of them at a time, in the forward pass and again in
the backward pass. Peak memory grows with chunk x vocabulary, not with batch x length x vocabulary.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from colocate_rl.errors import ConfigError
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training import attention
from colocate_rl.training.adapters import causal_lm, effective
from colocate_rl.training.packing import PackedRows

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What a policy says about each completion token; 0 elsewhere."""

    logprobs: torch.Tensor
    """float32 [B, T], of the token itself, under the temperature."""
    entropy: torch.Tensor
    """float32 [B, T], of the distribution it was drawn from, without gradient; nats."""


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden states into logits: z = x W^T + b, optionally scaled and soft-capped."""

    weight: torch.Tensor
    """[V, H]."""
    bias: torch.Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "Head":
        """Reads the output head of a causal language model.

        Raises:
            ConfigError: when it is no plain linear layer, whose logits this module could not chunk.
        """
        layer = effective(model.get_output_embeddings())  # type: ignore[operator]
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"{type(model).__name__} has an output head of type {type(layer).__name__}; only a plain linear head "
                "is supported."
            )
        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        scale = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        return cls(layer.weight, layer.bias, scale / divisor, getattr(text, "final_logit_softcapping", None))


class _ChunkedStatistics(torch.autograd.Function):
    """Log-probability of given targets, and entropy, from hidden states; logits exist for one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps hidden [N, H] and targets [N] to log-probabilities and entropies, float32 [N] each."""
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits, _ = _logits(hidden[part], matrix, offset, head, temperature)
            total = logits.logsumexp(-1)
            normaliser[part] = total
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - total
            log_probabilities = logits.sub_(total[:, None])
            # In place: one chunk less at once.
            entropy[part] = -log_probabilities.exp().mul_(log_probabilities).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Recomputes each chunk's logits; d logp / d z = (onehot - softmax), chained through scale and soft cap."""
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits, slope = _logits(hidden[part], matrix, offset, ctx.head, ctx.temperature)
            delta = logits.sub_(normaliser[part, None]).exp_().mul_(-grad[part, None])
            delta.scatter_add_(-1, targets[part, None], grad[part, None])
            delta.mul_(slope)
            delta = delta.to(hidden.dtype)
            torch.mm(delta, matrix, out=grad_hidden[part])
            if grad_weight is not None:
                _accumulate(grad_weight, delta, hidden[part])
            if grad_bias is not None:
                grad_bias += delta.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _accumulate(total: torch.Tensor, delta: torch.Tensor, hidden: torch.Tensor) -> None:
    if delta.dtype == total.dtype:
        total.addmm_(delta.t(), hidden)
    else:
        total.add_(delta.t() @ hidden)


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, offset: torch.Tensor | None, head: Head, temperature: float
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Temperature-scaled float32 logits [n, V] of a chunk, and their slope with respect to the raw ones."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = nn.functional.linear(hidden, matrix, offset).float()
    slope: float | torch.Tensor = head.scale / temperature
    if head.softcap is None:
        return logits.mul_(slope), slope
    bent = logits.mul_(head.scale / head.softcap).tanh_()
    return bent * (head.softcap / temperature), (1 - bent.square()) * slope


def completion_statistics(
    wrapper: nn.Module,
    policy: nn.Module,
    batch: RolloutBatch,
    *,
    temperature: float,
    chunk: int,
    autocast: Callable[[], Any],
    packed: bool = False,
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
    """

    def compute(model: nn.Module) -> TokenStatistics:
        model = causal_lm(model)
        with autocast():
            states = (_packed_states if packed else _padded_states)(model, batch)
            kind = states.device.type
            if torch.is_autocast_enabled(kind):  # the last norm gives float32; the head computes in autocast's type
                states = states.to(torch.get_autocast_dtype(kind))
        chosen = batch.completion_mask[:, 1:]
        head = Head.of(model)
        flat_logprobs, flat_entropy = _ChunkedStatistics.apply(
            states, head.weight, head.bias, batch.input_ids[:, 1:][chosen], head, temperature, chunk
        )
        shape = batch.input_ids.shape
        logprobs = torch.zeros(shape, device=states.device)
        logprobs[:, 1:] = logprobs[:, 1:].masked_scatter(chosen, flat_logprobs)
        entropy = torch.zeros(shape, device=states.device)
        entropy[:, 1:][chosen] = flat_entropy
        return TokenStatistics(logprobs, entropy)

    return _through_wrapper(wrapper, policy, batch.input_ids, compute)


def _decoder(model: nn.Module) -> Any:
    return model.base_model if hasattr(model, "base_model_prefix") else model


def _padded_states(model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """Hidden states [n, H] that predict the completion tokens, row by row."""
    output = _decoder(model)(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    states: torch.Tensor = output.last_hidden_state[:, :-1][batch.completion_mask[:, 1:]]
    return states


def _packed_states(model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """The same from a pass without padding."""
    rows = PackedRows.of(batch)
    attention.check_installed(model)
    output = _decoder(model)(**rows.arguments(), use_cache=False)
    states: torch.Tensor = output.last_hidden_state[0][rows.predicts]
    return states


def _through_wrapper(
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
