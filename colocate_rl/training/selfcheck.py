"""Proves on a few short rows, before training, that a faster way to run a model computes what the plain way does."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from colocate_rl.engine.protocol import Completion
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.objective import Objective
from colocate_rl.training.policy import has_dropout

LENGTHS = ((5, 1), (1, 9), (11, 21), (2, 14), (11, 8))
"""Prompt and completion tokens of each row: different enough that a row that saw another one would show. The last row
has the prompt of the other one of that length."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two ways agree on the same rows."""

    logprob_gap: float
    """Mean |difference| of the log-probabilities of completion tokens, in nats."""
    gradient_cosine: float
    """Between the gradients of the policy's vectors (norms and biases), which reach through every layer; where only an
    adapter is trained, of the adapter."""

    def shortfall(self, *, exact: bool) -> str | None:
        """What is wrong, or None.

        Args:
            exact: whether the model computes in float32; else the two ways round differently.
        """
        if not self.logprob_gap <= (1e-3 if exact else 0.05):
            return f"log-probabilities differ by {self.logprob_gap:.2g} nats on average"
        if not self.gradient_cosine >= (0.999 if exact else 0.98):
            return f"gradients have a cosine of only {self.gradient_cosine:.4f}"
        return None


def compare(model: PreTrainedModel, plain: Objective, faster: Objective) -> Agreement:
    """Runs the same rows through ``model`` both ways; its weights and gradients stay as they are.

    Args:
        model: a model on its device, ready for both ways.
        plain: the way that is right.
        faster: the way to prove.
    """
    was_training = model.training
    if has_dropout(model):
        model.eval()  # dropout would be another one in each pass
    try:
        batch = _rows(model).to(model.device)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        vectors = [weight for weight in trained if weight.ndim == 1] or trained  # an adapter has matrices only
        (expected, expected_gradient), (found, gradient) = (
            _pass(model, replace(way, max_tokens=None), batch, vectors) for way in (plain, faster)
        )
    finally:
        model.train(was_training)
    gap = (expected - found)[batch.completion_mask].abs().mean()
    cosine = torch.nn.functional.cosine_similarity(expected_gradient, gradient, dim=0) if vectors else 1.0
    return Agreement(float(gap), float(cosine))


def _rows(model: PreTrainedModel) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()

    def ids(length: int) -> list[int]:
        drawn: list[int] = torch.randint(embeddings.weight.shape[0], (length,), generator=generator).tolist()
        return drawn

    prompts = {length: ids(length) for length, _ in LENGTHS}
    return RolloutBatch.from_rows(
        [prompts[length] for length, _ in LENGTHS],
        [Completion(ids(length), [0.0] * length, "length") for _, length in LENGTHS],
        torch.zeros(len(LENGTHS)),
        keep=[True] * len(LENGTHS),
        pad_token_id=0,
    )


def _pass(
    model: PreTrainedModel, objective: Objective, batch: RolloutBatch, vectors: list[torch.nn.Parameter]
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.set_grad_enabled(bool(vectors)):
        logprobs = objective.statistics(model, model, batch).logprobs
    if not vectors:
        return logprobs, torch.zeros(0)
    found = torch.autograd.grad(logprobs.sum(), vectors, materialize_grads=True)
    return logprobs.detach(), torch.cat([part.float().flatten() for part in found])
