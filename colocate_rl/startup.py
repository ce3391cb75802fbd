"""From a checked run to models that can be trained: everything before ``transformers.Trainer`` takes over."""

from dataclasses import dataclass

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from colocate_rl import preflight, settings
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.training import adapters
from colocate_rl.training import policy as policies
from colocate_rl.training.loading import load_models


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a run, and what is known of them and their work."""

    policy: PreTrainedModel
    """Perhaps with an adapter."""
    reference: PreTrainedModel | None
    """See :func:`colocate_rl.training.loading.load_models`."""
    longest_prompt: int
    """Tokens of the longest training prompt."""
    end_token_ids: tuple[int, ...]
    pad_token_id: int


def load(args: GRPOConfig, collectives: Collectives, given: preflight.Given, checked: preflight.Checked) -> Loaded:
    """Loads policy, reference and reward models; every rank must call it.

    Args:
        args: the run's configuration; ``gradient_checkpointing`` is settled.
        collectives: of the training ranks.
        given: to the trainer.
        checked: the same, checked; its rewards are made ready.
    """
    set_seed(args.seed)
    with collectives.failing_together("loading the model"):
        policy, reference = load_models(given.model, args, given.peft_config, given.quantization_config)
    with collectives.failing_together("preparing rewards"):
        checked.rewards.prepare(args.device)
    longest = int(collectives.max(torch.tensor([checked.longest_prompt])))
    settings.decide_checkpointing(args, policy, checked.placement, longest)
    if args.gradient_checkpointing and adapters.has_adapter(policy):
        policy.enable_input_require_grads()  # else nothing before the first adapter would ask for a gradient
    end_token_ids = policies.end_token_ids(policy.generation_config, checked.tokenizer)
    pad_token_id = policies.pad_token_id(checked.tokenizer)
    policies.set_pad_token(policy, pad_token_id)
    return Loaded(policy, reference, longest, end_token_ids, pad_token_id)
