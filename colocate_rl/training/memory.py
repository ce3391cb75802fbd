"""Whether a training step fits the device without recomputing activations: an estimate from the model's shape."""

from dataclasses import dataclass
from typing import Any

STATE_BYTES_PER_PARAMETER = {4: 16, 2: 8}
"""Weights, gradients and AdamW's two moments together, by the bytes of one weight."""
HEADROOM = 0.75
"""Share of the device that the estimate may fill; the rest is for a chunk's logits, fragmentation and its own error."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Estimated bytes of a training step without recomputation."""

    state: int
    """Weights, gradients and optimizer."""
    activations: int
    """What the forward pass of one micro-batch keeps for the backward pass."""

    def fits(self, device_bytes: float) -> bool:
        """True when the step takes at most :data:`HEADROOM` of ``device_bytes``."""
        return self.state + self.activations <= HEADROOM * device_bytes


def estimate_step(config: Any, *, num_parameters: int, weight_bytes: int, num_tokens: int) -> StepMemory:
    """Estimates a step from hidden size h, key/value width k and feed-forward width f of the decoder.

    A layer keeps, per token, about 10 h + 6 k + 4 f values of 16 bits (norms, projections, rotations, attention and a
    gated feed-forward block) and 4 h of 32 bits (the norms compute in float32).

    Args:
        config: the policy's configuration; unknown fields count as the usual multiples of h.
        num_parameters: trained parameters.
        weight_bytes: of one weight, 4 or 2.
        num_tokens: padded tokens of one micro-batch.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = int(text.hidden_size)
    heads = int(getattr(text, "num_attention_heads", 1))
    head_size = getattr(text, "head_dim", None) or hidden // heads
    kv = int(getattr(text, "num_key_value_heads", None) or heads) * int(head_size)
    wide = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    per_token = 2 * (10 * hidden + 6 * kv + 4 * wide) + 4 * 4 * hidden
    activations = per_token * int(text.num_hidden_layers) * num_tokens
    return StepMemory(STATE_BYTES_PER_PARAMETER[weight_bytes] * num_parameters, activations)
