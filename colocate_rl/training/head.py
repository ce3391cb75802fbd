"""The output head: log-probabilities and entropies from hidden states, a chunk of tokens at a time.

Logits of all tokens never exist. The head is applied to one chunk in the forward pass and again in the backward pass;
what follows the matrix product is written as two functions (:func:`summarise`, :func:`pull`), which a GPU runs as one
or two compiled kernels instead of a dozen passes over chunk x vocabulary. Uncompiled they work in place on one copy.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colocate_rl.errors import ConfigError
from colocate_rl.training.adapters import effective
from colocate_rl.training.shape import text_config


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
        text = text_config(model.config)
        scale = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        return cls(layer.weight, layer.bias, scale / divisor, getattr(text, "final_logit_softcapping", None))

    def curve(self, temperature: float) -> "Curve":
        """From this head's raw logits to those that are sampled from."""
        return Curve(self.scale / temperature, None if self.softcap is None else self.softcap / temperature)


@dataclass(frozen=True, slots=True)
class Curve:
    """z = factor y for the raw logits y; with a ceiling c, z = c tanh(factor y / c)."""

    factor: float
    ceiling: float | None

    def apply(self, raw: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Float32 logits z [n, V], and dz/dy."""
        scaled = raw.to(torch.float32, copy=True).mul_(self.factor)
        if self.ceiling is None:
            return scaled, self.factor
        bent = scaled.div_(self.ceiling).tanh_()
        return bent * self.ceiling, (1 - bent.square()) * self.factor


def summarise(
    raw: torch.Tensor, targets: torch.Tensor, curve: Curve
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of raw logits [n, V] and targets int64 [n]: log-probabilities, entropies, normalisers; float32 [n] each."""
    logits, _ = curve.apply(raw)
    normaliser = logits.logsumexp(-1)
    log_p = logits.sub_(normaliser[:, None])
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -log_p.exp().mul_(log_p).sum(-1), normaliser


def pull(
    raw: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    entropy: torch.Tensor,
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    curve: Curve,
) -> torch.Tensor:
    """Gradient with respect to the raw logits [n, V], in their type.

    With p = softmax(z): d logp / dz = onehot - p, and dH / dz = -p (log p + H) for the entropy H.
    """
    logits, slope = curve.apply(raw)
    log_p = logits.sub_(normaliser[:, None])
    if grad_entropy is None:
        delta = log_p.exp_().mul_(-grad[:, None])
    else:
        weight = (log_p + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
        delta = log_p.exp_().mul_(weight).neg_()
    return _with_targets(delta, targets, grad).mul_(slope).to(raw.dtype)


def _with_targets(delta: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Adds each row's gradient at its target: in place, or, where all of it becomes one kernel, as part of that."""
    if torch.compiler.is_compiling():
        chosen = torch.arange(delta.shape[-1], device=delta.device)[None] == targets[:, None]
        return delta + torch.where(chosen, grad[:, None], 0.0)
    return delta.scatter_add_(-1, targets[:, None], grad[:, None])


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _chosen(function: Callable[..., Any], compiled: bool, raw: torch.Tensor) -> Callable[..., Any]:
    if not compiled:
        return function
    torch._dynamo.maybe_mark_dynamic(raw, 0)  # the last chunk is shorter
    return _compiled(function)


class ChunkedStatistics(torch.autograd.Function):
    """Log-probability of given targets, and entropy, from hidden states; logits exist for one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        curve: Curve,
        chunk: int,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps hidden [N, H] and targets int64 [N] to log-probabilities and entropies, float32 [N] each."""
        count = hidden.shape[0]
        logprobs, entropy, normaliser = (
            torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            raw = _raw(hidden[part], matrix, offset)
            run = _chosen(summarise, compiled, raw)
            logprobs[part], entropy[part], normaliser[part] = run(raw, targets[part], curve)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.curve, ctx.chunk, ctx.compiled = curve, chunk, compiled
        ctx.set_materialize_grads(False)  # an entropy that nobody learns from costs nothing in the backward pass
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Recomputes each chunk's logits and chains :func:`pull` through the head."""
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        grad = torch.zeros_like(normaliser) if grad is None else grad
        matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            raw = _raw(hidden[part], matrix, offset)
            run = _chosen(pull, ctx.compiled, raw)
            pulled = None if grad_entropy is None else grad_entropy[part]
            delta = run(raw, targets[part], normaliser[part], entropy[part], grad[part], pulled, ctx.curve)
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


def _raw(hidden: torch.Tensor, matrix: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden, matrix, offset)


def _accumulate(total: torch.Tensor, delta: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds delta^T hidden [V, H] to a float32 total, without rounding the product where the device can."""
    if delta.dtype == total.dtype:
        total.addmm_(delta.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, delta.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.add_(delta.t() @ hidden)
