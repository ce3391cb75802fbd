"""Faster ways to run the models, each taken only where it is possible and proven to compute the same."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.training import attention, compiling, packing, selfcheck
from colocate_rl.training import policy as policies
from colocate_rl.training.objective import Objective

logger = logging.getLogger(__name__)


def decide_packing(
    args: GRPOConfig, models: Sequence[PreTrainedModel], objective: Objective, collectives: Collectives
) -> Objective:
    """Lets rows pass through the models without padding where that is wanted, possible and proven to be the same.

    Args:
        args: the run's configuration.
        models: policy and, where there is one, reference, on their device.
        objective: computes with padding.
        collectives: every rank must call this; all of them decide alike.

    Returns:
        The objective to use.
    """
    wanted = args.padding_free if args.padding_free is not None else args.device.type == "cuda"
    if not wanted:
        return objective
    packed = replace(objective, packed=True)

    def prepare(model: PreTrainedModel) -> str | None:
        known = packing.obstacle(model)
        if known is not None:
            return f"is not made for packed rows: {known}"
        attention.install(model)
        return None

    reason = _first_reason(collectives, lambda: _prove(args, models, prepare, objective, packed, "on packed rows"))
    if reason is None:
        return packed
    for model in models:
        if model.config._attn_implementation == attention.NAME:
            attention.uninstall(model)
    logger.log(
        logging.WARNING if args.padding_free else logging.INFO,
        "rows keep their padding: %s %s. padding_free=False says so without asking.",
        type(models[0]).__name__,
        reason,
    )
    return objective


def decide_compiling(
    args: GRPOConfig, models: Sequence[PreTrainedModel], objective: Objective, collectives: Collectives
) -> Objective:
    """Compiles layers and head where that is wanted, possible and proven to be the same.

    Args:
        args: the run's configuration.
        models: policy and, where there is one, reference, on their device.
        objective: computes with the layers as they are.
        collectives: every rank must call this; all of them decide alike.

    Returns:
        The objective to use.
    """
    wanted = args.compile_layers if args.compile_layers is not None else args.device.type == "cuda"
    if not wanted:
        return objective
    compiled = replace(objective, compiled=True)

    def prepare(model: PreTrainedModel) -> str | None:
        if objective.router is not None:
            return "has routers whose load is read by hooks, which compiled layers would not call"
        if not compiling.layers_of(model):
            return "names no layers to compile"
        compiling.install(model)
        return None

    reason = _first_reason(collectives, lambda: _prove(args, models, prepare, objective, compiled, "compiled"))
    if reason is None:
        return compiled
    for model in models:
        compiling.uninstall(model)
    logger.warning(
        "layers run uncompiled: %s %s. compile_layers=False says so without asking.", type(models[0]).__name__, reason
    )
    return objective


def _first_reason(collectives: Collectives, find: Callable[[], str | None]) -> str | None:
    return next((reason for reason in collectives.gather_objects(find()) if reason), None)


def _prove(
    args: GRPOConfig,
    models: Sequence[PreTrainedModel],
    prepare: Callable[[PreTrainedModel], str | None],
    plain: Objective,
    faster: Objective,
    how: str,
) -> str | None:
    """Prepares the models; why they must run as they are, or None."""
    exact = policies.model_dtype(models[0]) == torch.float32 and not (args.bf16 or args.fp16)
    for model in models:
        try:
            reason = prepare(model)
            if reason is not None:
                return reason
            found = selfcheck.compare(model, plain, faster)
        except Exception as error:  # whatever a model of another kind stumbles over: it runs as it is
            return f"fails {how} ({type(error).__name__}: {error})"
        shortfall = found.shortfall(exact=exact)
        if shortfall is not None:
            return f"computes something else {how}: {shortfall}"
        logger.info(
            "%s %s: mean log-probability gap %.1e to the plain way, cosine of gradients %.6f",
            type(model).__name__,
            how,
            found.logprob_gap,
            found.gradient_cosine,
        )
    return None
