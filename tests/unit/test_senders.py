"""What is prepared for an engine, and what is not."""

import pytest
import torch

from colocate_rl.engine.transformers_engine import TransformersEngine
from colocate_rl.senders import WholeSender
from colocate_rl.training.merging import PolicyTensor
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit


def test_an_engine_that_is_the_policy_costs_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised base weights would be expanded all at once, only to be dropped."""

    def base(tensor: PolicyTensor) -> torch.Tensor:
        raise AssertionError(f"{tensor.name} was made")

    monkeypatch.setattr(PolicyTensor, "base", base)
    policy = tiny_model()
    WholeSender(policy).send(TransformersEngine(policy, seed=1, max_num_seqs=4, max_model_length=None))
