"""Generation with less Python per token than ``LLM.generate``, on the same engine and with the same result.

``LLM.generate`` spends most of a decode step in Python. Five things are done differently here; whatever is not listed,
and every token that is not a plain one, stays with vLLM's own code:

1. *No output objects.* While it generates, our engine's ``output_processor`` is a :class:`_Collector`, which appends
   ids and log-probabilities to lists. Adding and validating requests, seeds of completions, and steps are vLLM's.
2. *Tokens are taken over in one loop.* A token that ends nothing (no stop, no limit) changes a few fields of its
   request; :class:`colocate_rl.engine.steps.Steps` does just that.
3. *Log-probabilities* are read from the step's array at once.
4. *No allocation without a block.* A running request whose next token fits into the block it has needs no new slot,
   and there is nothing to cache.
5. *A plain decode step is scheduled in one loop*, by :class:`colocate_rl.engine.decoding.Decoding`.

The last four stand in for methods of vLLM, so they are used only where these methods are ones that were read
(:mod:`colocate_rl.engine.known`); elsewhere the first is used alone, or the first four.
"""

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from colocate_rl.engine.known import obstacle
from colocate_rl.engine.protocol import Completion, Deliver
from colocate_rl.engine.steps import WRONG_TOKENS, Steps, Unfinished, replaced
from colocate_rl.errors import EngineError

Generate = Callable[[Sequence[Sequence[int]], Sequence[Any]], list[list[Completion]]]
Prompt = tuple[Sequence[int], Any]
"""Token ids of a prompt, and its ``SamplingParams``."""
More = Callable[[int], tuple[int, Prompt] | None]
"""See :meth:`LeanGenerator.work_off`."""


class _Collector:
    """What ``LLMEngine`` asks of an output processor, without output objects."""

    def __init__(self, max_model_length: int) -> None:
        self._max_model_length = max_model_length
        self._open: dict[int, list[Unfinished]] = {}
        self._newest = 0
        self._unfinished: dict[int, int] = {}
        self._whole: list[int] = []
        self.running: dict[str, Unfinished] = {}

    def expect(self, position: int) -> None:
        """Says to which prompt the completions that are added next belong."""
        self._newest = position
        self._open[position] = []
        self._unfinished[position] = 0

    def finished(self) -> list[tuple[int, list[Completion]]]:
        """The prompts all of whose completions have ended since the last call."""
        whole, self._whole = self._whole, []
        return [(position, [sequence.completion() for sequence in self._open.pop(position)]) for position in whole]

    def add_request(self, request: Any, *_: Any, **__: Any) -> None:
        """Called for every completion of the last prompt, in order, before the engine core has it."""
        params, num_prompt_tokens = request.sampling_params, len(request.prompt_token_ids)
        plain = not any(getattr(params, name, None) for name in ("structured_outputs", "repetition_detection"))
        sequence = Unfinished(
            num_prompt_tokens,
            frozenset((*(params.stop_token_ids or ()), params.eos_token_id)),
            min(params.max_tokens, self._max_model_length - num_prompt_tokens) if plain else 0,
            self._newest,
        )
        self._open[self._newest].append(sequence)
        self._unfinished[self._newest] += 1
        self.running[request.request_id] = sequence

    def process_outputs(self, outputs: Sequence[Any], *_: Any, **__: Any) -> Any:
        """Takes over what the engine core put into outputs of its own."""
        for output in outputs:
            sequence = self.running.get(output.request_id)
            if sequence is None:  # of a request that was aborted
                continue
            if output.new_token_ids:
                if output.new_logprobs.logprob_token_ids[:, 0].tolist() != output.new_token_ids:
                    raise EngineError(WRONG_TOKENS)
                sequence.token_ids += output.new_token_ids
                sequence.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                sequence.finish_reason = str(output.finish_reason)
                del self.running[output.request_id]
                self._unfinished[sequence.position] -= 1
                if not self._unfinished[sequence.position]:
                    self._whole.append(sequence.position)
        return SimpleNamespace(request_outputs=[], reqs_to_abort=[])

    def update_scheduler_stats(self, *_: Any) -> None:
        """There are none."""


class LeanGenerator:
    """Generates with an ``LLM`` whose engine core runs in this process.

    Args:
        llm: the ``LLM``.

    Raises:
        EngineError: when the engine is not built as this needs it.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        core = getattr(self._engine.engine_core, "engine_core", None)
        if core is None or not hasattr(self._engine, "output_processor"):
            raise EngineError("the engine's core does not run in this process, or is arranged in an unknown way.")
        self._core = core
        self.obstacle = obstacle(core)
        """Why steps stay with vLLM; None: they do not."""
        self.adapter: Any = None
        """The ``LoRARequest`` that every request carries; None: the weights alone answer."""
        self._steps = None if self.obstacle else Steps(core)

    def generate(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> list[list[Completion]]:
        """Completions of every prompt, as ``LLM.generate`` samples them.

        Args:
            prompts: token ids of each prompt.
            parameters: ``SamplingParams`` of each prompt, with log-probabilities and without stop strings.
        """
        answers: dict[int, list[Completion]] = {}
        self.work_off(list(zip(prompts, parameters, strict=True)), lambda _: None, answers.__setitem__)
        return [answers[position] for position in range(len(prompts))]

    def work_off(self, prompts: Sequence[Prompt], more: More, deliver: Deliver) -> None:
        """Generates for some prompts, and for further ones as soon as there is room.

        Args:
            prompts: asked for at once, positions counted from 0; what the engine has no room for waits inside it.
            more: asked between steps, with the number of completions that are not finished; gives the position of one
                prompt and the prompt, or None when there is no room or nothing left.
            deliver: takes the completions of each prompt as soon as they have all ended.
        """
        collector = _Collector(self._engine.model_config.max_model_len)
        try:
            with (
                replaced(self._engine, "output_processor", collector),
                self._steps.standing_in(collector.running) if self._steps else contextlib.nullcontext(),
            ):
                for position, prompt in enumerate(prompts):
                    self._add(collector, position, prompt)
                self._run(collector, more, deliver)
        except BaseException:
            forget(self._llm)
            raise

    def _run(self, collector: _Collector, more: More, deliver: Deliver) -> None:
        while True:
            while (taken := more(len(collector.running))) is not None:
                self._add(collector, *taken)
            if not collector.running:
                return
            if not self._core.scheduler.requests:
                raise EngineError(f"the engine lost {len(collector.running)} requests.")
            self._engine.step()
            for position, completions in collector.finished():
                deliver(position, completions)

    def _add(self, collector: _Collector, position: int, prompt: Prompt) -> None:
        collector.expect(position)
        tokens = {"type": "token", "prompt_token_ids": list(prompt[0])}
        self._engine.add_request(str(next(self._llm.request_counter)), tokens, prompt[1], lora_request=self.adapter)

    def compare(self, usual: Generate, parameters: Callable[..., Any]) -> None:
        """Samples from a few short prompts with seeds, then greedily, here and with ``usual``.

        Args:
            usual: generates as ``LLM.generate`` does.
            parameters: makes ``SamplingParams``.

        Raises:
            EngineError: when the answers differ; log-probabilities may by what a kernel adds in another order.
        """
        config = self._engine.model_config
        longest, vocabulary = config.max_model_len, config.get_vocab_size()
        prompts = [[(7 * length + place) % vocabulary for place in range(length)] for length in (1, 2, 5, 14)]
        prompts = [prompt[: max(longest - 2, 1)] for prompt in prompts]
        # Enough tokens for two ends of a block of 16, and completions that end in different steps.
        lengths = [min(20 + len(prompt), longest - len(prompt)) for prompt in prompts]
        for values in ({"temperature": 1.0, "n": 2}, {"temperature": 0.0}):
            params = [
                parameters(max_tokens=length, ignore_eos=True, seed=len(prompt), **values)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            answers = []
            for generate in (usual, self.generate):
                self._llm.reset_prefix_cache()  # else the second would compute less of the prompts
                answers.append([completion for answer in generate(prompts, params) for completion in answer])
            for one, other in zip(*answers, strict=True):
                if (one.token_ids, one.finish_reason) != (other.token_ids, other.finish_reason):
                    raise EngineError(f"it sampled {other.token_ids} where LLM.generate sampled {one.token_ids}.")
                found = (one.sampling_logprobs, other.sampling_logprobs)
                if not np.allclose(*found, rtol=0, atol=1e-3, equal_nan=True):
                    raise EngineError("its log-probabilities differ from those of LLM.generate.")


def forget(llm: Any) -> None:
    """Aborts all requests of an ``LLM``, and has its worker forget them too: it can generate again."""
    core, outputs = llm.llm_engine.engine_core.engine_core, llm.llm_engine.output_processor
    with contextlib.suppress(Exception):
        outputs.abort_requests(list(outputs.request_states), internal=True)
    with contextlib.suppress(Exception):
        core.model_executor.sample_tokens(None)  # of a step that was computed and not sampled; else it does nothing
    with contextlib.suppress(Exception):
        core.abort_requests(list(core.scheduler.requests))
        for _ in range(4):  # what is still under way, then the step that tells the worker
            if core.batch_queue or core.scheduler.has_requests():
                with contextlib.suppress(Exception):
                    core.step_fn()
    if core.batch_queue:
        core.batch_queue.clear()
