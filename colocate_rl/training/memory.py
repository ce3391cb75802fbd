"""Whether a training step fits the device without recomputing activations: an estimate from the model's shape."""

from dataclasses import dataclass
from typing import Any

from colocate_rl.training.shape import DecoderShape

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
    shape = DecoderShape.of(config)
    kv = shape.num_kv_heads * shape.head_size
    per_token = 2 * (10 * shape.hidden_size + 6 * kv + 4 * shape.intermediate_size) + 4 * 4 * shape.hidden_size
    activations = per_token * shape.num_layers * num_tokens
    return StepMemory(STATE_BYTES_PER_PARAMETER[weight_bytes] * num_parameters, activations)
