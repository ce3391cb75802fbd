"""Faster ways to run the models, each taken only where it is possible and proven to compute the same."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.training import adapters, attention, compiling, packing, selfcheck
from colocate_rl.training import policy as policies
from colocate_rl.training.objective import Objective

logger = logging.getLogger(__name__)


AsReference = Callable[[], AbstractContextManager[object]]
"""Makes a context in which the policy, by its adapter alone, is the reference."""


def decide(
    args: GRPOConfig,
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    objective: Objective,
    collectives: Collectives,
) -> Objective:
    """Lets the models run without padding and compiled, where that is wanted, possible and proven to be the same.

    Args:
        args: the run's configuration.
        policy: on its device, with or without adapter.
        reference: a model of its own, or None.
        objective: computes with padding, layers as they are.
        collectives: every rank must call this; all of them decide alike.

    Returns:
        The objective to use.
    """
    models: list[Any] = [adapters.causal_lm(model) for model in (policy, reference) if model is not None]
    as_reference = None
    if isinstance(policy, PeftModel) and args.beta != 0.0:
        as_reference = partial(adapters.reference_weights, policy)
    objective = decide_packing(args, models, objective, collectives, as_reference)
    return decide_compiling(args, models, objective, collectives, as_reference)


def decide_packing(
    args: GRPOConfig,
    models: Sequence[PreTrainedModel],
    objective: Objective,
    collectives: Collectives,
    as_reference: AsReference | None = None,
) -> Objective:
    """Lets rows pass through the models without padding; arguments as in :func:`_decide`."""

    def prepare(model: PreTrainedModel) -> str | None:
        known = packing.obstacle(model)
        if known is not None:
            return f"is not made for packed rows: {known}"
        attention.install(model)
        return None

    def undo(model: PreTrainedModel) -> None:
        if model.config._attn_implementation == attention.NAME:
            attention.uninstall(model)

    level = logging.WARNING if args.padding_free else logging.INFO
    way = _Way(
        name="packed",
        how="on packed rows",
        otherwise="rows keep their padding",
        setting="padding_free",
        level=level,
        prepare=prepare,
        undo=undo,
    )
    return _decide(args, models, objective, collectives, as_reference, way)


def decide_compiling(
    args: GRPOConfig,
    models: Sequence[PreTrainedModel],
    objective: Objective,
    collectives: Collectives,
    as_reference: AsReference | None = None,
) -> Objective:
    """Compiles layers and head; arguments as in :func:`_decide`."""

    def prepare(model: PreTrainedModel) -> str | None:
        if objective.router is not None:
            return "has routers whose load is read by hooks, which compiled layers would not call"
        if not compiling.layers_of(model):
            return "names no layers to compile"
        compiling.install(model)
        return None

    way = _Way(
        name="compiled",
        how="compiled",
        otherwise="layers run uncompiled",
        setting="compile_layers",
        level=logging.WARNING,
        prepare=prepare,
        undo=compiling.uninstall,
    )
    return _decide(args, models, objective, collectives, as_reference, way)


@dataclass(frozen=True, slots=True)
class _Way:
    """A faster way to run models, and what is said where it is not taken."""

    name: str
    """The field of the objective that is set."""
    how: str
    otherwise: str
    setting: str
    """Its name in the configuration, where None means: on a GPU."""
    level: int
    """Of the log."""
    prepare: Callable[[PreTrainedModel], str | None]
    """Makes a model run this way; why it cannot, or None."""
    undo: Callable[[PreTrainedModel], None]


def _decide(
    args: GRPOConfig,
    models: Sequence[PreTrainedModel],
    objective: Objective,
    collectives: Collectives,
    as_reference: AsReference | None,
    way: _Way,
) -> Objective:
    """Takes a faster way where it is wanted, possible and proven to be the same.

    Args:
        args: the run's configuration.
        models: the causal language models of policy and, where there is one, reference, on their device.
        objective: goes the plain way.
        collectives: every rank must call this; all of them decide alike.
        as_reference: where the reference is the first model without its adapter.
        way: the faster one.

    Returns:
        The objective that goes this way, where no rank has found a reason against it; else as it was.
    """
    setting: bool | None = getattr(args, way.setting)
    if not (setting if setting is not None else args.device.type == "cuda"):
        return objective
    changes: dict[str, Any] = {way.name: True}
    faster = replace(objective, **changes)
    shortfall = _Proof(args, objective, faster, way).shortfall(models, as_reference)
    reason = next((found for found in collectives.gather_objects(shortfall) if found), None)
    if reason is None:
        return faster
    for model in models:
        way.undo(model)
    model_name = type(models[0]).__name__
    logger.log(way.level, "%s: %s %s. %s=False says so without asking.", way.otherwise, model_name, reason, way.setting)
    return objective


@dataclass(frozen=True, slots=True)
class _Proof:
    """Shows that models compute the same two ways."""

    args: GRPOConfig
    plain: Objective
    faster: Objective
    way: _Way

    def shortfall(self, models: Sequence[PreTrainedModel], as_reference: AsReference | None) -> str | None:
        """Prepares the models; why they must run as they are, or None."""
        for model in models:
            reason = self._difference(model, self.way.prepare)
            if reason is not None:
                return reason
        if as_reference is None:
            return None
        with as_reference():  # a compiled layer must notice that an adapter is switched off
            reason = self._difference(models[0])
        return None if reason is None else f"{reason}, without its adapter"

    def _difference(
        self, model: PreTrainedModel, prepare: Callable[[PreTrainedModel], str | None] = lambda model: None
    ) -> str | None:
        exact = policies.model_dtype(model) == torch.float32 and not (self.args.bf16 or self.args.fp16)
        try:
            reason = prepare(model)
            if reason is not None:
                return reason
            found = selfcheck.compare(model, self.plain, self.faster)
        except Exception as error:  # whatever a model of another kind stumbles over: it runs as it is
            return f"fails {self.way.how} ({type(error).__name__}: {error})"
        shortfall = found.shortfall(exact=exact)
        if shortfall is not None:
            return f"computes something else {self.way.how}: {shortfall}"
        logger.info(
            "%s %s: mean log-probability gap %.1e to the plain way, cosine of gradients %.6f",
            type(model).__name__,
            self.way.how,
            found.logprob_gap,
            found.gradient_cosine,
        )
        return None
