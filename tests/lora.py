"""Policies with adapters that do something, and what they should compute."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.tiny import tiny_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_policy(model: PreTrainedModel | None = None, *, tied: bool = True, **changes: Any) -> PeftModel:
    """A tiny policy whose adapter already changes its output."""
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(LINEAR), "task_type": "CAUSAL_LM"}
    policy = get_peft_model(model or tiny_model(tied=tied), LoraConfig(**{**values, **changes}))
    move(policy, 1)
    return policy


def move(policy: PeftModel, step: int) -> None:
    """Changes everything that is trained, as an optimizer would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.15 * noise.to(parameter.device, parameter.dtype))


def by_peft(policy: PeftModel) -> PreTrainedModel:
    """The same policy as PEFT itself merges it, in a copy."""
    merged: PreTrainedModel = copy.deepcopy(policy).merge_and_unload()
    return merged
