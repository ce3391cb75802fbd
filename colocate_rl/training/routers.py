"""Load balancing of mixture-of-experts models (Fedus et al. 2021, Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

The loss of a slice is E x sum over experts e of f_e P_e: f_e the share of (token, layer) pairs that are routed to e
(each to several experts), P_e the mean probability that the routers give e. Only P has a gradient, so with f of the
whole slice known the loss is a sum over tokens, and micro-batches add up to it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from colocate_rl.errors import ConfigError
from colocate_rl.training.shape import text_config


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What the routers of all layers did with some tokens. Shape letter: E experts."""

    assigned: torch.Tensor
    """float32 [E]: (token, layer) pairs routed to each expert, without gradient."""
    probability: torch.Tensor
    """float32 [E]: sum of the probabilities given to each expert, with gradient."""
    num_routed: torch.Tensor
    """Scalar: tokens x layers."""

    def __add__(self, other: "RouterLoad") -> "RouterLoad":
        return RouterLoad(
            self.assigned + other.assigned,
            self.probability + other.probability,
            self.num_routed + other.num_routed,
        )


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """How a model's load balancing counts in the loss."""

    weight: float
    experts_per_token: int


def router_load(logits: Sequence[torch.Tensor], num_holders: torch.Tensor, experts_per_token: int) -> RouterLoad:
    """Counts what the routers did.

    Args:
        logits: of each layer's router, [N, E].
        num_holders: N entries, how often each token counts; 0 for padding.
        experts_per_token: k, experts that a token goes to.
    """
    num_experts = logits[0].shape[-1]
    counted = num_holders.reshape(-1).float()
    assigned = torch.zeros(num_experts, device=counted.device)
    probability = torch.zeros(num_experts, device=counted.device)
    for layer in logits:
        given = layer.float().softmax(-1)
        chosen = given.detach().topk(experts_per_token, dim=-1).indices
        assigned = assigned.index_add(0, chosen.reshape(-1), counted.repeat_interleave(experts_per_token))
        probability = probability + (given * counted[:, None]).sum(0)
    return RouterLoad(assigned, probability, counted.sum() * len(logits))


def balance_loss(part: RouterLoad, whole: RouterLoad) -> torch.Tensor:
    """A micro-batch's part of the loss of its slice, a scalar; at least 1 in all where every expert is used alike."""
    num_routed = whole.num_routed.clamp(min=1)
    return len(part.assigned) * (whole.assigned / num_routed * part.probability / num_routed).sum()


def router_loss(
    config: PretrainedConfig, weight: float | None, checkpointing: dict[str, Any] | str | None
) -> RouterLoss | None:
    """How load balancing counts for a model; None: not at all.

    Args:
        config: of the policy; no weights are needed.
        weight: the setting ``router_aux_loss_coef``; None: the model's own.
        checkpointing: the setting ``gradient_checkpointing_kwargs``.

    Raises:
        ConfigError: for a weight on a model without load balancing, or one whose routers could not be read.
    """
    text = text_config(config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    balanced = hasattr(text, "output_router_logits") and hasattr(
        sys.modules.get(getattr(kind, "__module__", "")), "load_balancing_loss_func"
    )
    if not balanced:
        if weight:
            raise ConfigError(
                f"router_aux_loss_coef={weight}, but {type(config).__name__} belongs to no mixture-of-experts model "
                "with a load-balancing loss, so there is nothing to weigh. Remove the setting."
            )
        return None
    weight = weight if weight is not None else float(getattr(text, "router_aux_loss_coef", None) or 0.0)
    if weight == 0.0:
        return None
    experts_per_token = getattr(text, "num_experts_per_tok", None)
    if experts_per_token is None:
        raise ConfigError(
            f"{type(config).__name__} does not say how many experts a token goes to (num_experts_per_tok), so its "
            f"load-balancing loss (weight {weight}) cannot be computed. Set router_aux_loss_coef=0 to train without."
        )
    if isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
        raise ConfigError(
            f"gradient_checkpointing_kwargs={checkpointing} hides the routers from the load-balancing loss (weight "
            f"{weight}). Remove use_reentrant, or set router_aux_loss_coef=0 to train without that loss."
        )
    return RouterLoss(weight, int(experts_per_token))
