"""The policy itself as an engine, through ``transformers``' ``generate``: a reference, and a fallback without vLLM.

It has no weights of its own, so it never needs a weight sync. Sampling is a logits processor that runs last: it applies
the filters in vLLM's order, draws by inverting the cumulated distribution, writes down the log-probability of what it
drew, and leaves ``generate`` (greedy) no other choice. Each completion has its own uniform numbers, drawn before
anything is generated, so that it does not depend on what else is in the batch (up to the rounding of batched matrix
products, which may tip a draw that lies within about 1e-6 of a boundary).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from colocate_rl.engine.protocol import Completion, Request, SamplingSpec


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion to be sampled."""

    place: tuple[int, int]
    """Number of its request, and of the copy."""
    prompt: Sequence[int]
    limit: int
    """Most new tokens: the sampling's, or what the window leaves."""
    uniforms: torch.Tensor
    """float64 [limit], each in [0, 1): one number decides one token."""


class TransformersEngine:
    """Generates with the live policy of this rank.

    Args:
        policy: the unwrapped causal language model; its current weights are used in every call.
        seed: of the stream that requests without a seed sample from.
        autocast: makes the mixed-precision context of a forward pass.
        max_num_seqs: most completions in one batch.
        max_model_length: context window in tokens, prompt plus completion; None: no limit.
        options: further attributes of the ``GenerationConfig`` that say how to compute, such as
            ``cache_implementation``.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        max_num_seqs: int,
        max_model_length: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy = policy
        self._autocast = autocast
        self._max_num_seqs = max_num_seqs
        self._window = max_model_length
        self._options = dict(options or {})
        self._stream = torch.Generator().manual_seed(seed)

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        """See :meth:`colocate_rl.engine.protocol.Engine.generate`."""
        rows = self._rows(requests, sampling.max_tokens)
        found: dict[tuple[int, int], Completion] = {}
        # Rows that the window cuts short go by themselves: a model may have no positions beyond it.
        rows.sort(key=lambda row: (row.limit, len(row.prompt)))
        with self._generating():
            for _, equals in itertools.groupby(rows, key=lambda row: row.limit):
                alike = list(equals)
                for start in range(0, len(alike), self._max_num_seqs):
                    batch = alike[start : start + self._max_num_seqs]
                    answers = self._sample(batch, sampling)
                    found |= {row.place: answer for row, answer in zip(batch, answers, strict=True)}
        return [[found[n, copy] for copy in range(r.num_completions)] for n, r in enumerate(requests)]

    def _rows(self, requests: Sequence[Request], max_tokens: int) -> list[_Row]:
        rows = []
        for number, request in enumerate(requests):
            limit = max_tokens if self._window is None else min(max_tokens, self._window - len(request.token_ids))
            for copy in range(request.num_completions):
                source = self._stream
                if request.seed is not None:
                    source = torch.Generator().manual_seed(request.seed + copy)
                uniforms = torch.rand(limit, generator=source, dtype=torch.float64)
                rows.append(_Row((number, copy), request.token_ids, limit, uniforms))
        return rows

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Without gradient or dropout; and nothing in the model's folder has a say in how tokens are sampled."""
        policy = self._policy
        was_training, own = policy.training, policy.generation_config
        policy.eval()
        policy.generation_config = GenerationConfig()
        try:
            with torch.no_grad(), self._autocast():
                yield
        finally:
            policy.generation_config = own
            policy.train(was_training)

    def _sample(self, rows: Sequence[_Row], sampling: SamplingSpec) -> list[Completion]:
        """One batch, padded on the left; all rows have the same limit."""
        device = next(self._policy.parameters()).device
        width = max(len(row.prompt) for row in rows)
        # A row is padded with its own first token: masked, like any padding, and no news to a repetition penalty.
        ids = torch.tensor([[row.prompt[0]] * (width - len(row.prompt)) + list(row.prompt) for row in rows])
        mask = torch.arange(width) >= width - torch.tensor([[len(row.prompt)] for row in rows])
        draw = _Draw(sampling, torch.stack([row.uniforms for row in rows]).to(device))
        extra = dict(sampling.extra)
        stops = () if extra.pop("ignore_eos", False) else sampling.stop_token_ids
        config = GenerationConfig(
            max_new_tokens=rows[0].limit,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=int(ids[0, 0]),  # fills up rows that have ended, and is cut off again
            **extra,
            **self._options,
        )
        output: Any = self._policy.generate(  # type: ignore[operator]  # mixed in by PreTrainedModel
            ids.to(device), attention_mask=mask.to(device), generation_config=config, logits_processor=[draw]
        )
        sampled = output[:, width:].tolist()
        logprobs = torch.stack(draw.logprobs, dim=1).tolist()
        return [_cut(ids, values, frozenset(stops)) for ids, values in zip(sampled, logprobs, strict=True)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing: the policy's weights are the engine's, always."""

    def reseed(self, seed: int) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.reseed`."""
        self._stream.manual_seed(seed)

    def close(self) -> None:
        """Does nothing: the policy stays with the trainer."""


class _Draw(LogitsProcessor):
    """Decides each row's next token, and remembers its log-probability.

    Args:
        sampling: temperature and filters.
        uniforms: float64 [rows, steps].
    """

    def __init__(self, sampling: SamplingSpec, uniforms: torch.Tensor) -> None:
        self._filters = _filters(sampling)
        self._greedy = sampling.temperature == 0
        self._uniforms = uniforms
        self.logprobs: list[torch.Tensor] = []
        """float32 [rows] of every step so far."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        logprobs = self._filters(input_ids, scores.float()).log_softmax(-1)
        if self._greedy:
            chosen = logprobs.argmax(-1, keepdim=True)
        else:
            chosen = invert(logprobs.double().exp(), self._uniforms[:, len(self.logprobs), None])
        self.logprobs.append(logprobs.gather(-1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


def invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose part of the cumulated distribution holds the uniform number (inverse transform sampling).

    Args:
        probabilities: float64 [rows, V], up to rounding of sum 1.
        uniforms: float64 [rows, 1], each in [0, 1).

    Returns:
        int64 [rows, 1]: a token of probability above 0.
    """
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:].contiguous()
    last = torch.searchsorted(cumulated, total)  # where the total is reached: nothing behind it is possible
    return torch.searchsorted(cumulated, uniforms * total, right=True).minimum(last)


def _filters(sampling: SamplingSpec) -> Any:
    """Penalty, temperature, min_p, top_k, top_p: in vLLM's order, each only where it does something."""
    filters: Any = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        filters.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return filters
    if sampling.temperature != 1.0:
        filters.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p > 0:
        filters.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    return filters


def _cut(token_ids: list[int], logprobs: list[float], stops: frozenset[int]) -> Completion:
    """What comes up to and with the first stop token."""
    for place, token in enumerate(token_ids):
        if token in stops:
            return Completion(token_ids[: place + 1], logprobs[: place + 1], "stop")
    return Completion(token_ids, logprobs, "length")
