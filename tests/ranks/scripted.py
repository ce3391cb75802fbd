"""An engine without a model: its completions say who made them, for which prompt, when and as which copy.

Order, loss, duplication and seed mistakes then become comparisons of equal values.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from colocate_rl.engine.protocol import Completion, FinishReason, Request, SamplingSpec

LARGEST_ID = 100_000
"""Far beyond the tokenizer of ``tests.tiny`` (258 tokens)."""
LENGTHS = (0, 1, 2, 3, 5, 9)

Fault = Literal["raise", "lose a completion", "lose a prompt", "shorten log-probs", "refuse weights"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``generate`` and its answer."""

    requests: tuple[Request, ...]
    sampling: SamplingSpec
    answers: list[list[Completion]]


class ScriptedEngine:
    """Speaks the Engine protocol.

    Args:
        number: of the engine; marks what it samples from its own stream.
        fault: what it does wrong, in every call.
        logprob_error: added to every log-probability it reports.
    """

    def __init__(self, number: int, *, fault: Fault | None = None, logprob_error: float = 0.0) -> None:
        self.number = number
        self.fault = fault
        self.logprob_error = logprob_error
        self.calls: list[Call] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.num_loads = 0
        self.num_closes = 0
        self._stream_seed = 0

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        if self.fault == "raise":
            raise RuntimeError(f"engine {self.number} is told to fail")
        stream = f"engine {self.number}, seed {self._stream_seed}, call {len(self.calls)}"
        answers, drawn = [], 0
        for request in requests:
            answer = []
            for copy in range(request.num_completions):
                if request.seed is None:
                    source = f"{stream}, draw {drawn}"
                    drawn += 1
                else:
                    source = seed_source(request.seed + copy)
                answer.append(scripted_completion(request.token_ids, source, self.logprob_error))
            answers.append(answer)
        self.calls.append(Call(tuple(requests), sampling, answers))
        return _spoiled(answers, self.fault)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.fault == "refuse weights":
            raise RuntimeError(f"engine {self.number} is told to refuse weights")
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.num_loads += 1

    def reseed(self, seed: int) -> None:
        self._stream_seed = seed

    def close(self) -> None:
        self.num_closes += 1


def seed_source(seed: int) -> str:
    """Names the source of a completion with a seed of its own: no engine and no call in it."""
    return f"request seed {seed}"


def scripted_completion(prompt: Sequence[int], source: str, logprob_error: float = 0.0) -> Completion:
    """The completion of a prompt from a source of chance; a pure function, so that tests can tell what to expect."""
    key = repr((tuple(prompt), source)).encode()
    draw = random.Random(hashlib.blake2b(key, digest_size=8).digest())
    reasons: tuple[FinishReason, ...] = ("stop", "length")
    token_ids = [draw.randrange(LARGEST_ID) for _ in range(draw.choice(LENGTHS))]
    logprobs = [scripted_logprob(token, place) + logprob_error for place, token in enumerate(token_ids)]
    return Completion(token_ids, logprobs, draw.choice(reasons))


def scripted_logprob(token: int, place: int) -> float:
    """Log-probability of a token at a place in its completion; exact in float32."""
    return -((token * 7 + place * 11) % 64 + 1) / 32


def _spoiled(answers: list[list[Completion]], fault: Fault | None) -> list[list[Completion]]:
    if fault == "lose a completion":
        return [*answers[:-1], answers[-1][:-1]]
    if fault == "lose a prompt":
        return answers[:-1]
    if fault == "shorten log-probs":
        longer = Completion([1, 2, 3], [-1.0, -1.0], "stop")
        return [*answers[:-1], [*answers[-1][:-1], longer]]
    return answers
