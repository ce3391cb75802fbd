"""The models of a run: the policy, with its adapter where one is trained, and the reference."""

import logging
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from colocate_rl.config import GRPOConfig
from colocate_rl.options import dictionary
from colocate_rl.training import adapters
from colocate_rl.training import policy as policies

logger = logging.getLogger(__name__)


def load_models(
    model: str | PreTrainedModel, args: GRPOConfig, peft_config: Any = None, quantization_config: Any = None
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Loads what is given by name, and checks what can only be seen then.

    Args:
        model: folder or hub name, or the model itself (with its adapter, perhaps).
        args: the run's configuration.
        peft_config: of the adapter that is to be trained, or None.
        quantization_config: of the base weights under it, or None.

    Returns:
        The policy, and the reference where ``beta`` needs one that is a model of its own: an adapter is switched off
        instead (:func:`colocate_rl.training.adapters.reference_weights`).

    Raises:
        ConfigError: when an adapter does not fit.
    """
    init_kwargs = dictionary(args.model_init_kwargs)
    if quantization_config is not None:
        init_kwargs |= {"quantization_config": quantization_config, "device_map": {"": args.device}}
    trust = args.trust_remote_code
    name = model if isinstance(model, str) else None
    policy = model if not isinstance(model, str) else policies.load_policy(model, init_kwargs, trust_remote_code=trust)
    adapters.check_plain(policy)
    if policies.leaves_out_softcap(adapters.causal_lm(policy)):
        logger.warning(
            "attn_implementation='sdpa' leaves out the cap on attention scores (attn_logit_softcapping), which the "
            "engines apply, so the policy is another model than they are. Load it with attn_implementation='eager'."
        )
    if peft_config is not None:
        policy = adapters.add_adapter(policy, peft_config)
    reference = None
    if adapters.has_adapter(policy):
        adapters.check_adapters(policy)
        if args.beta != 0.0 and peft_config is None:
            adapters.add_reference(policy)
    elif args.beta != 0.0:
        reference = policies.make_reference(policy, name, init_kwargs, trust_remote_code=trust)
    _settle_dropout(args, policy, reference)
    return policy, reference


def _settle_dropout(args: GRPOConfig, policy: nn.Module, reference: nn.Module | None) -> None:
    for loaded in (policy, reference):
        if args.disable_dropout and loaded is not None:
            policies.disable_dropout(loaded)
    if policies.has_dropout(policy):
        logger.warning(
            "The policy has dropout, which stays on while it trains: its log-probabilities then differ from the "
            "engine's. Set disable_dropout=True to train without."
        )
