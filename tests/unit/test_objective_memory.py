"""No objective ever holds more than a chunk's logits, whatever it reads entropies for."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colocate_rl import GRPOConfig, settings
from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from tests.tiny import tiny_model
from tests.unit.test_packing import make_batch

pytestmark = pytest.mark.unit


@contextlib.contextmanager
def early() -> Iterator[Callable[[torch.Tensor], None]]:
    yield lambda loss: loss.backward()


class LargestOfVocabulary(TorchDispatchMode):
    """Notes how many rows of the vocabulary's width any tensor ever had, the output head apart."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab, self.hidden, self.most = vocab, hidden, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and self.vocab in made.shape and self.hidden not in made.shape:
                self.most = max(self.most, made.numel() // self.vocab)
        return result


@pytest.mark.parametrize("changes", [{}, {"entropy_coef": 0.1}, {"entropy_coef": 0.1, "top_entropy_quantile": 0.5}])
@pytest.mark.parametrize("budget", [None, 200])
def test_logits_exist_for_one_chunk_at_most(tmp_path: Path, changes: dict[str, Any], budget: int | None) -> None:
    """Forward and backward pass of 400 tokens, with everything that reads entropies."""
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_tokens_per_micro_batch=budget,
        logprob_chunk_size=16,
        **changes,
    )
    model = tiny_model(layers=1, vocab=288).float()
    lengths = [(3, 97), (2, 98), (1, 99), (4, 96)]
    batch = make_batch(*lengths)
    objective = settings.objective(args, model.config, contextlib.nullcontext, Collectives(torch.device("cpu")))
    with LargestOfVocabulary(288, 64) as watched:
        loss, _ = objective.loss(model, model, batch, 5.0, MetricBuffer(), early)
        loss.backward()
    assert 0 < watched.most <= 16
