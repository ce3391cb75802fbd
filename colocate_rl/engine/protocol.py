"""What a rollout asks of an inference engine, without vLLM: a scripted engine in the tests speaks it too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
"""A reason travels as its place in here."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample. Every value is explicit, so that no file in a model's folder changes it quietly."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these, which is part of it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the engine's own sampling parameters; they win."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how many completions of it are wanted."""

    token_ids: Sequence[int]
    num_completions: int
    seed: int | None = None
    """Completion j samples with seed + j. None: from the engine's own stream."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for a prompt, bit for bit; in a dialogue also what tools wrote in between."""

    token_ids: Sequence[int]
    """[C] sampled ids, the stop token included; may be beyond the tokenizer's range."""
    sampling_logprobs: Sequence[float]
    """[C] log-probability of each id under the distribution it was sampled from; 0 for ids that were not sampled."""
    finish_reason: FinishReason
    policy_version: int = 0
    """Version of the policy whose weights sampled it."""
    sampled: Sequence[bool] | None = None
    """[C] False for ids that a tool or an environment wrote: never learned from. None: all were sampled."""

    @property
    def num_sampled(self) -> int:
        """Ids that the engine sampled."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)


class Claims(Protocol):
    """Gives out 0, 1, 2, ... to whoever asks, each number once; others may ask from other processes."""

    def next(self) -> int:
        """The next number."""
        ...


@dataclass(slots=True)
class Work:
    """An engine's share of a generation batch: requests of its own, and some that all engines may take from."""

    requests: Sequence[Request]
    """Its own, then the common ones, which every engine has in the same order."""
    num_own: int
    claims: Claims | None = None
    """Who takes which common one, counted from the first; None: there are none."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Work":
        """Requests that are all the engine's own."""
        return cls(requests, len(requests))

    def claim(self) -> int | None:
        """Position of one more request for this engine, or None when all are taken."""
        if self.claims is None:
            return None
        position = self.num_own + self.claims.next()
        if position < len(self.requests):
            return position
        self.claims = None
        return None


Deliver = Callable[[int, list[Completion]], None]
"""Takes a request's position in its :class:`Work` and all its completions, as soon as they are there."""


@dataclass(frozen=True, slots=True)
class Span:
    """When something began and ended, on the clock that all processes of a machine share (``time.monotonic``)."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """A linear layer's low-rank factors, as they lie in the flat tensor that :meth:`LoraEngine.load_adapter` takes."""

    name: str
    """Of the layer in a checkpoint, without ``.weight``."""
    rank: int
    num_inputs: int
    num_outputs: int

    @property
    def num_values(self) -> int:
        """Numbers of A [rank, inputs] and B [outputs, rank] together."""
        return self.rank * (self.num_inputs + self.num_outputs)


def factor_views(flat: torch.Tensor, layers: Sequence[AdapterLayer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's A [rank, inputs] and B [outputs, rank] (times the scaling) in ``flat``, one after the other."""
    parts = flat.split(
        [size for layer in layers for size in (layer.rank * layer.num_inputs, layer.rank * layer.num_outputs)]
    )
    return [
        (a.view(layer.rank, layer.num_inputs), b.view(layer.num_outputs, layer.rank))
        for layer, a, b in zip(layers, parts[::2], parts[1::2], strict=True)
    ]


class Engine(Protocol):
    """One inference engine, or this rank's shard of one."""

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        """Completions of every request, in order; with shards, all of them are called with the same arguments."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes over the policy's weights, completely or with an error, and forgets cached values of the old ones."""
        ...

    def reseed(self, seed: int) -> None:
        """Restarts the stream that requests without a seed sample from."""
        ...

    def close(self) -> None:
        """Frees the engine's memory; may be called twice."""
        ...


@runtime_checkable
class LoraEngine(Engine, Protocol):
    """An engine that takes what LoRA training changes without the rest; :meth:`load_weights` has to come first."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes over some of the tensors, and forgets cached values of the old ones.

        A tensor is read before the next one is asked for, so they can be made one by one.
        """
        ...

    def load_adapter(self, layers: Sequence[AdapterLayer], flat: torch.Tensor) -> None:
        """Takes over an adapter that stays apart from the weights, and forgets cached values of the old one.

        Args:
            layers: the adapted layers; the same at each call.
            flat: their factors, see :func:`factor_views`.
        """
        ...


@runtime_checkable
class Incremental(Engine, Protocol):
    """An engine that takes requests while others run, and gives up each one as it finishes."""

    def work_off(self, work: Work, sampling: SamplingSpec, deliver: Deliver) -> None:
        """Answers its own requests, and common ones whenever it has room; the finished ones are delivered at once."""
        ...


@runtime_checkable
class Background(Engine, Protocol):
    """An engine that can also answer while its rank does something else."""

    def begin(self, work: Work, sampling: SamplingSpec) -> None:
        """Starts generating and returns at once; nothing else may be asked before :meth:`finish`."""
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        """What has finished since the last call, by position; waits that long for something to come."""
        ...

    def finish(self) -> tuple[list[tuple[int, list[Completion]]], Span]:
        """Waits for the rest of what :meth:`begin` started: what no :meth:`poll` gave, and when the engine worked."""
        ...
