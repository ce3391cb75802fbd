"""Sampling of plain requests, in the place of vLLM's sampler, which reads the logits several times.

Plain is what reinforcement learning asks for most: a temperature, the log-probability of the sampled token, and nothing
that changes single logits. A batch with any other request is left to vLLM's sampler.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from colocate_rl.engine.known import is_read_sampler
from colocate_rl.errors import EngineError

logger = logging.getLogger(__name__)

Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""See :func:`colocate_rl.engine.kernels.draw`."""
SPECIAL = ("compute_nans", "trace_replay_state", "return_sampling_mask")
"""What a sampler must not have or do."""
FREE = {
    *("n", "seed", "max_tokens", "temperature", "top_k", "logprobs", "flat_logprobs", "output_kind", "skip_clone"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "_eos_token_id", "_all_stop_token_ids"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_text_buffer_length"),
    *("watermarking", "_watermarking_skipped"),
}
"""Fields of ``SamplingParams`` that a plain request may set: those that change no logit, and those looked at here.

vLLM 0.32 says in each request whether it is watermarked; an engine that does so has another sampler.
"""


def is_plain(params: Any) -> bool:
    """Whether a request's tokens are sampled from softmax(logits / temperature).

    Args:
        params: its ``SamplingParams``.
    """
    return (
        params.temperature > 0
        and params.top_k in (0, -1)
        and params.logprobs == 0
        and all(getattr(params, name) == value for name, value in _usual(params.__class__).items())
    )


@functools.cache
def _usual(kind: Any) -> dict[str, Any]:
    """The fields that a plain request leaves as they are, and their values."""
    params = kind()
    return {name: getattr(params, name) for name in kind.__struct_fields__ if name not in FREE}


def runner_of(core: Any) -> Any:
    """The model runner of an engine core in this process; None: it has another form."""
    worker = getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)
    return getattr(worker, "model_runner", None)


def take_over(core: Any) -> None:
    """Has our kernels sample plain requests from now on, where vLLM samples in a known way; else the log says why not.

    Args:
        core: an engine core on a GPU, of this process; no request may be under way.
    """
    runner = runner_of(core)
    try:
        why_not = obstacle(runner)
        if why_not is None:
            from colocate_rl.engine.kernels import draw

            check(draw, runner.device)
            stand_in(runner.sampler, draw, runner.device)
    except Exception as error:
        logger.warning("Sampling with vLLM's sampler, which is slower: ours failed its check: %r", error)
        return
    if why_not is not None:
        logger.info("Sampling with vLLM's sampler: %s.", why_not)


def obstacle(runner: Any) -> str | None:
    """Why the batches of this model runner must all stay with its sampler; None: plain ones need not."""
    sampler: Any = getattr(runner, "sampler", None)
    kind: Any = type(sampler)
    if not is_read_sampler(kind):
        return f"this vLLM samples by another {kind.__module__}.{kind.__name__}"
    special = [name for name in SPECIAL if getattr(sampler, name, None)]
    if special:
        return f"the sampler uses {', '.join(special)}"
    if sampler.logprobs_mode != "processed_logprobs":
        return f"log-probabilities are {sampler.logprobs_mode}"
    processors = getattr(sampler, "logits_processors", ())  # plugins among them
    if getattr(runner.model_config, "logits_processors", None) or not all(map(_is_vllms, processors)):
        return "logits processors are set"
    return None


def _is_vllms(processor: Any) -> bool:
    return type(processor).__module__.startswith("vllm.")


def stand_in(sampler: Any, draw: Draw, device: torch.device) -> None:
    """Has plain batches, with logits on ``device``, sampled by ``draw`` instead of vLLM's method of this sampler."""
    vllms: Any = type(sampler)
    ours: Any = _kind(vllms)
    ours.takes_over(sampler, draw, device)  # before it is one, so that a sampler that lacks something stays vLLM's
    sampler.__class__ = ours


@contextlib.contextmanager
def vllms_sampler(runner: Any) -> Iterator[None]:
    """Until the block ends, vLLM's own sampler samples everything; for comparisons with vLLM alone."""
    sampler: Any = getattr(runner, "sampler", None)
    before: Any = type(sampler)
    if not hasattr(sampler, "takes_over"):
        yield
        return
    sampler.__class__ = before.__base__
    try:
        yield
    finally:
        sampler.__class__ = before


@functools.cache
def _kind(vllms: Any) -> type[Any]:
    """A subclass of vLLM's sampler, which an existing one becomes."""
    names: dict[str, Any] = vars(vllms)["__call__"].__globals__
    from_vllm = {name: names[name] for name in ("SamplerOutput", "get_num_sampled_and_rejected")}
    tensors_type = _logprobs_type(names)

    class PlainSampler(vllms):
        """vLLM's sampler, except for batches of plain requests."""

        def takes_over(self, draw: Draw, device: torch.device) -> None:
            """Begins; all requests so far are vLLM's."""
            self.own_draw = draw
            self.is_plain_at = np.zeros(self.sampling_states.max_num_reqs, dtype=bool)
            # vLLM gives the rank of each sampled token too. Nobody here reads it, so all have these zeros.
            self.no_ranks = torch.zeros(len(self.is_plain_at), dtype=torch.int64, device=device)

        def add_request(self, place: int, *others: Any) -> Any:
            self.is_plain_at[place] = is_plain(others[-1])
            return super().add_request(place, *others)

        def __call__(self, logits: torch.Tensor, batch: Any) -> Any:
            places = batch.idx_mapping_np
            if logits.shape[0] != len(places) or not self.is_plain_at[places].all():
                return super().__call__(logits, batch)
            states = self.sampling_states
            tokens, logprobs = self.own_draw(
                logits,
                batch.idx_mapping,
                states.temperature.gpu,
                states.seeds.gpu,
                batch.positions,
                batch.logits_indices,
            )
            num_sampled, num_rejected = from_vllm["get_num_sampled_and_rejected"](
                batch.seq_lens.new_ones(batch.num_reqs),
                batch.seq_lens,
                batch.cu_num_logits,
                batch.idx_mapping,
                self.req_states.prefill_len.gpu,
            )
            columns = tokens[:, None]
            return from_vllm["SamplerOutput"](
                sampled_token_ids=columns,
                logprobs_tensors=tensors_type(columns, logprobs[:, None], self.no_ranks[: len(places)]),
                num_nans=None,
                num_sampled=num_sampled,
                num_rejected=num_rejected,
            )

    return PlainSampler


def _logprobs_type(names: dict[str, Any]) -> type[Any]:
    """vLLM's ``LogprobsTensors``, as the function that fills it for the sampler sees it."""
    fill = names.get("compute_topk_scores") or names["compute_topk_logprobs"]
    kind: type[Any] = fill.__globals__["LogprobsTensors"]
    return kind


def check(draw: Draw, device: torch.device) -> None:
    """Draws from made-up logits, and compares with torch.

    Raises:
        EngineError: when a token is drawn that has no mass or too often, or a log-probability is wrong.
    """
    count, vocabulary = 512, 10_000
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(vocabulary, generator=generator)).repeat(count, 1)
    logits[:, 4096:8192] = float("-inf")
    logits[::2, 7] += 16
    places = torch.arange(count, dtype=torch.int32)
    temperatures = torch.where(places % 2 == 0, 1.0, 0.7)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    arguments = (logits.bfloat16(), places, temperatures, seeds, places.long() % 50, places.long())
    tokens, logprobs = (found.cpu() for found in draw(*(tensor.to(device) for tensor in arguments)))
    expected = (logits.bfloat16().double() / temperatures.double()[:, None]).log_softmax(-1)
    difference = (expected.gather(1, tokens.clamp(0, vocabulary - 1)[:, None])[:, 0] - logprobs).abs().max()
    if not difference < 1e-4:
        raise EngineError(f"the sampling kernels give log-probabilities that differ by {difference} from torch's.")
    often = expected[0].exp()[7] * count / 2
    found_often = (tokens[::2] == 7).sum()
    if abs(found_often - often) > 6 * (often * (1 - expected[0].exp()[7])).sqrt() + 1:
        raise EngineError(f"the sampling kernels draw a token {found_often} times that is expected {often:.0f} times.")
    if len(tokens[1::2].unique()) < 8:
        raise EngineError("the sampling kernels draw the same tokens whatever the seed.")
