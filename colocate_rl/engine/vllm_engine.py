"""A vLLM engine inside a training rank: the only importer of vLLM.

Every entry goes through :class:`colocate_rl.isolation.PrivateProcess`; vLLM itself is imported inside it, on first use.
"""

import atexit
import contextlib
import functools
import gc
import logging
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colocate_rl.engine.folder import check_tokenizer, write_model, write_tokenizer
from colocate_rl.engine.lean import LeanGenerator, Prompt, forget
from colocate_rl.engine.protocol import Completion, Deliver, Request, SamplingSpec, Work
from colocate_rl.engine.spec import EngineSpec, environment, first_group
from colocate_rl.engine.weights import CopyPlan, CopyRecorder, check_consumption, check_names
from colocate_rl.errors import ConfigError, EngineError, WeightSyncError
from colocate_rl.isolation import PrivateProcess

logger = logging.getLogger(__name__)


class VllmEngine:
    """One vLLM engine, or one tensor-parallel shard of it, in this process.

    Args:
        spec: see :class:`EngineSpec`.

    Raises:
        EngineError: when vLLM cannot be built as asked.
    """

    _living: "weakref.ref[VllmEngine] | None" = None

    def __init__(self, spec: EngineSpec) -> None:
        other = VllmEngine._living() if VllmEngine._living is not None else None
        if other is not None and other._llm is not None:
            raise EngineError(
                "Another engine lives in this process, and vLLM keeps state that two would share. Call close() on the "
                "trainer that has it first."
            )
        VllmEngine._living = weakref.ref(self)
        self._spec = spec
        self._device = None if spec.device is None else torch.device("cuda", spec.device)
        self._process = PrivateProcess(self._device, environment(spec), first_group(spec))
        self._llm: Any = None
        self._model: Any = None
        self._lean: LeanGenerator | None = None
        self._plan: CopyPlan | None = None
        self._checked = False
        self._folder = tempfile.TemporaryDirectory(prefix="colocate_rl_engine_")
        atexit.register(self.close)
        frozen = gc.get_freeze_count()
        try:
            with self._process.entered(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # vLLM looks at deprecated names of torch as it loads
                self._build()
        except BaseException:
            self._release()
            raise
        finally:
            if not frozen:
                gc.unfreeze()  # vLLM freezes the whole heap, the trainer's garbage included

    def _build(self) -> None:
        spec = self._spec
        write_model(Path(self._folder.name), spec.model_config, spec.dtype)
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": self._folder.name,
            "skip_tokenizer_init": spec.tokenizer is None,
            "model_impl": spec.model_impl,
            "load_format": "dummy",
            "generation_config": "vllm",
            "dtype": spec.dtype,
            "seed": spec.seed,
            "max_model_len": spec.max_model_length,
            "max_num_seqs": spec.max_num_seqs,
            "enforce_eager": spec.enforce_eager,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
        }
        if spec.tokenizer is not None:
            arguments["tokenizer"] = write_tokenizer(Path(self._folder.name), spec.tokenizer)
        if spec.device is not None:
            arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
            arguments["device_ids"] = [spec.device]
        if spec.tensor_parallel_size > 1:
            arguments["tensor_parallel_size"] = spec.tensor_parallel_size
            arguments["distributed_executor_backend"] = "external_launcher"
            if spec.device is not None:
                arguments["device_ids"] = list(spec.shard_devices)
        try:
            self._llm = LLM(**{**arguments, **spec.extra})
        except TypeError as error:
            if not spec.extra:
                raise
            raise ConfigError(
                f"vllm_engine_kwargs={dict(spec.extra)}: vLLM takes no such argument ({error})."
            ) from error
        if spec.tokenizer is not None:
            check_tokenizer(spec.tokenizer, self._llm.get_tokenizer())
        self._model = self._llm.apply_model(_itself)[0]
        if not isinstance(self._model, torch.nn.Module):
            raise EngineError(
                f"vLLM gave {type(self._model).__name__} as its model; its core does not run in this process."
            )
        if spec.lean:
            self._lean = self._proven_lean()

    def _proven_lean(self) -> LeanGenerator | None:
        """The lean way to generate, compared with ``LLM.generate`` once; None, with a warning, if it fails."""
        try:
            lean = LeanGenerator(self._llm)
            with torch.random.fork_rng([] if self._device is None else [self._device]):
                lean.compare(self._by_llm, _parameters)
        except Exception as error:
            logger.warning("Generating with LLM.generate, which is slower: the lean way failed its check: %r", error)
            return None
        if lean.obstacle:
            logger.info("Generating without output objects, but each step as vLLM takes it: %s.", lean.obstacle)
        return lean

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        """See :meth:`colocate_rl.engine.protocol.Engine.generate`."""
        answers: dict[int, list[Completion]] = {}
        self.work_off(Work.of(requests), sampling, answers.__setitem__)
        return [answers[position] for position in range(len(requests))]

    def work_off(self, work: Work, sampling: SamplingSpec, deliver: Deliver) -> None:
        """See :meth:`colocate_rl.engine.protocol.Incremental.work_off`; ``deliver`` is called in the engine's view."""
        with self._process.entered():
            prompts = [_as_prompt(request, sampling) for request in work.requests]
            try:
                if self._lean is not None:
                    self._lean.work_off(prompts[: work.num_own], functools.partial(self._more, work, prompts), deliver)
                else:
                    self._work_off_by_llm(work, prompts, deliver)
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"the engine failed while it generated: {error!r}") from error

    def _more(self, work: Work, prompts: Sequence[Prompt], running: int) -> tuple[int, Prompt] | None:
        """One more common request while fewer completions run than the engine decodes at once."""
        if running >= self._spec.max_num_seqs:
            return None
        position = work.claim()
        return None if position is None else (position, prompts[position])

    def _work_off_by_llm(self, work: Work, prompts: Sequence[Prompt], deliver: Deliver) -> None:
        """``LLM.generate`` takes no requests meanwhile: common ones are taken as many at a time as it decodes."""
        positions = list(range(work.num_own))
        while True:
            running = sum(prompts[position][1].n for position in positions)
            while (taken := self._more(work, prompts, running)) is not None:
                positions.append(taken[0])
                running += taken[1][1].n
            if not positions:
                return
            answers = self._by_llm(*zip(*(prompts[position] for position in positions), strict=True))
            for position, completions in zip(positions, answers, strict=True):
                deliver(position, completions)
            positions = []

    def _by_llm(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> list[list[Completion]]:
        """With ``LLM.generate``."""
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False
            )
        except BaseException:
            forget(self._llm)
            raise
        return [[_completion(out) for out in sorted(output.outputs, key=lambda out: out.index)] for output in outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.load_weights`.

        Raises:
            WeightSyncError: when names or shapes differ from the policy's architecture, or the engine would not be
                filled completely; the engine must not be used afterwards.
        """
        named = dict(weights)
        check_names(named, self._spec.checkpoint)
        with self._process.entered():
            if self._device is None:
                self._reload(named)
            elif self._plan is None:
                self._plan = CopyPlan.record(self._model.load_weights, named, dict(self._model.named_parameters()))
            else:
                self._plan.apply(named)
            if self._device is not None:
                for device in {self._device, *(tensor.device for tensor in named.values())}:
                    torch.cuda.synchronize(device)
            if not self._llm.reset_prefix_cache():
                raise WeightSyncError("The engine kept its prefix cache, whose values belong to the old weights.")

    def _reload(self, named: Mapping[str, torch.Tensor]) -> None:
        """Through vLLM's own reload, which repacks weights where the backend needs it."""
        recorder = CopyRecorder(named)
        with torch.no_grad(), contextlib.nullcontext() if self._checked else recorder:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named.items())})
            _repack_tied(self._model)
        if not self._checked:
            check_consumption(recorder, named, self._spec.tensor_parallel_size)
            self._checked = True

    def reseed(self, seed: int) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.reseed`."""
        with self._process.entered():
            torch.manual_seed(seed)

    def close(self) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.close`."""
        if self._llm is not None:
            self._release()

    def _release(self) -> None:
        """Frees whatever has been built."""
        atexit.unregister(self.close)
        with self._process.entered():
            if self._llm is not None:
                self._llm.llm_engine.engine_core.shutdown()
            self._plan = self._model = self._lean = self._llm = None
            gc.collect()
            if "vllm" in sys.modules:
                from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
                from vllm.platforms import interface

                cleanup_dist_env_and_memory()
                interface._assigned_physical_gpu_ids = None  # else it refuses the next engine any other GPU
        self._folder.cleanup()


def _itself(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _repack_tied(model: torch.nn.Module) -> None:
    """Packs again every layer that shares its weight with another one.

    A tied head has no tensor of its own in a checkpoint, so the reload leaves the layer alone; where the backend
    computes from a packed copy, that copy would keep the values of the first load.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.numel() == 0:
            continue
        method: Any = getattr(module, "quant_method", None)
        if weight.data_ptr() in seen and method is not None:
            method.process_weights_after_loading(module)
        seen.add(weight.data_ptr())


def _parameters(**values: Any) -> Any:
    """vLLM's sampling parameters of one prompt; ids in, ids and log-probabilities out."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    try:
        if isinstance(values.get("structured_outputs"), dict):
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        return SamplingParams(**{"logprobs": 0, "detokenize": False, "flat_logprobs": True, **values})
    except TypeError as error:
        raise ConfigError(f"generation_kwargs: vLLM's SamplingParams takes no such key ({error}).") from error


def _as_prompt(request: Request, sampling: SamplingSpec) -> Prompt:
    values: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": True,  # end-of-sequence ids are named, not guessed from the model's folder
        "stop_token_ids": [] if sampling.extra.get("ignore_eos") else list(sampling.stop_token_ids),
        **sampling.extra,
    }
    return request.token_ids, _parameters(n=request.num_completions, seed=request.seed, **values)


def _completion(output: Any) -> Completion:
    token_ids = list(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"a completion ended with {output.finish_reason!r} after {len(token_ids)} tokens.")
    return Completion(token_ids, _sampled_logprobs(token_ids, output.logprobs), output.finish_reason)


def _sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The log-probability of each sampled token; the engine lists the sampled token first, then any other."""
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        found = [logprobs.token_ids[start] for start in starts]
        if found != list(token_ids):
            raise EngineError("the engine's log-probabilities belong to other tokens than it sampled.")
        return [float(logprobs.logprobs[start]) for start in starts]
    return [float(entry[token].logprob) for token, entry in zip(token_ids, logprobs, strict=True)]
