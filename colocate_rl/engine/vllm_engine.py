"""A vLLM engine inside a training rank: what is asked of it, through one entrance.

Every entry goes through :class:`colocate_rl.isolation.PrivateProcess`. vLLM's own objects are made and read in
:mod:`colocate_rl.engine.vllm_api`.
"""

import atexit
import contextlib
import functools
import gc
import logging
import random
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colocate_rl.engine.folder import check_tokenizer, write_model, write_tokenizer
from colocate_rl.engine.lean import LeanGenerator, Prompt, forget
from colocate_rl.engine.lora import AdapterSlot, without_slots
from colocate_rl.engine.protocol import AdapterLayer, Completion, Deliver, Request, SamplingSpec, Work
from colocate_rl.engine.sampling import take_over
from colocate_rl.engine.spec import EngineSpec, environment, first_group, llm_arguments
from colocate_rl.engine.vllm_api import (
    adapter_request,
    build_llm,
    completion_of,
    leave_groups,
    sampling_parameters,
    wraps_transformers,
)
from colocate_rl.engine.weights import CopyPlan, CopyRecorder, check_consumption, check_names
from colocate_rl.errors import ConfigError, EngineError, NeedsOwnProcessError, WeightSyncError
from colocate_rl.isolation import PrivateProcess

logger = logging.getLogger(__name__)


class VllmEngine:
    """One vLLM engine, or one tensor-parallel shard of it, in this process.

    Args:
        spec: see :class:`EngineSpec`.
        beside_policy: whether the policy lives in this process too.

    Raises:
        NeedsOwnProcessError: when it does, and vLLM has no code of its own for the model.
        EngineError: when vLLM cannot be built as asked.
    """

    _living: "weakref.ref[VllmEngine] | None" = None

    def __init__(self, spec: EngineSpec, *, beside_policy: bool = False) -> None:
        other = VllmEngine._living() if VllmEngine._living is not None else None
        if other is not None and other._llm is not None:
            raise EngineError(
                "Another engine lives in this process, and vLLM keeps state that two would share. Call close() on the "
                "trainer that has it first."
            )
        VllmEngine._living = weakref.ref(self)
        self._spec = spec
        self._beside_policy = beside_policy
        self._device = None if spec.device is None else torch.device("cuda", spec.device)
        self._process = PrivateProcess(self._device, environment(spec), first_group(spec))
        self._llm: Any = None
        self._model: Any = None
        self._lean: LeanGenerator | None = None
        self._plan: CopyPlan | None = None
        self._loaded: dict[str, torch.Tensor] = {}
        self._slot: AdapterSlot | None = None
        self._adapter: Any = None
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
        folder = Path(self._folder.name)
        architectures = write_model(folder, spec.model_config, spec.dtype)
        if self._beside_policy and wraps_transformers(architectures):
            raise NeedsOwnProcessError(
                f"vLLM runs {', '.join(architectures)} by wrapping transformers' own classes, for the whole process."
            )
        tokenizer = None if spec.tokenizer is None else write_tokenizer(folder, spec.tokenizer)
        try:
            self._llm = build_llm(llm_arguments(spec, self._folder.name, tokenizer), spec.extra)
        except ValueError as error:
            if spec.lora is None or "LoRA" not in str(error):
                raise
            raise ConfigError(f"vLLM has no LoRA slot for this model ({error}). Set lora_sync='merged'.") from error
        if spec.tokenizer is not None:
            check_tokenizer(spec.tokenizer, self._llm.get_tokenizer())
        self._model = self._llm.apply_model(_itself)[0]
        if not isinstance(self._model, torch.nn.Module):
            raise EngineError(
                f"vLLM gave {type(self._model).__name__} as its model; its core does not run in this process."
            )
        if self._device is not None and spec.tensor_parallel_size == 1:  # shards would have to take over together
            take_over(self._llm.llm_engine.engine_core.engine_core)
        if spec.lean:
            self._lean = self._proven_lean()

    def _proven_lean(self) -> LeanGenerator | None:
        """The lean way to generate, compared with ``LLM.generate`` once; None, with a warning, if it fails."""
        try:
            lean = LeanGenerator(self._llm)
            with torch.random.fork_rng([] if self._device is None else [self._device]):
                lean.compare(self._by_llm, sampling_parameters)
        except Exception as error:
            logger.warning("Generating with LLM.generate, which is slower: the lean way failed its check: %r", error)
            return None
        if lean.obstacle:
            logger.info("Generating without output objects, but each step as vLLM takes it: %s.", lean.obstacle)
        return lean

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """The engine's view of the process; only of an engine that has not been closed."""
        if self._llm is None:
            raise EngineError("the engine is closed.")
        with self._process.entered():
            yield

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        """See :meth:`colocate_rl.engine.protocol.Engine.generate`."""
        answers: dict[int, list[Completion]] = {}
        self.work_off(Work.of(requests), sampling, answers.__setitem__)
        return [answers[position] for position in range(len(requests))]

    def work_off(self, work: Work, sampling: SamplingSpec, deliver: Deliver) -> None:
        """See :meth:`colocate_rl.engine.protocol.Incremental.work_off`; ``deliver`` is called in the engine's view."""
        with self._entered():
            prompts = [_as_prompt(request, sampling) for request in work.requests]
            try:
                if self._lean is not None:
                    self._lean.adapter = self._adapter
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
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                parameters,
                use_tqdm=False,
                lora_request=self._adapter,
            )
        except BaseException:
            forget(self._llm)
            raise
        return [[completion_of(out) for out in sorted(output.outputs, key=lambda out: out.index)] for output in outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.load_weights`.

        Raises:
            WeightSyncError: when names or shapes differ from the policy's architecture, or the engine would not be
                filled completely; the engine must not be used afterwards.
        """
        named = dict(weights)
        check_names(named, self._spec.checkpoint)
        with self._entered():
            if self._device is None:
                self._loaded = named
                self._reload(named)
            elif self._plan is None:
                with without_slots(self._model):
                    self._plan = CopyPlan.record(self._model.load_weights, named, dict(self._model.named_parameters()))
            else:
                self._plan.apply(named)
            self._settle(named.values())

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`colocate_rl.engine.protocol.LoraEngine.update_weights`.

        Where the backend repacks weights (CPU), layers are loaded as a whole: what is not given is taken from the
        tensors of the last :meth:`load_weights`, which must still have their values.

        Raises:
            WeightSyncError: when a name or shape differs from the policy's architecture; the engine must not be used
                afterwards.
        """
        with self._entered():
            if self._device is None:
                changed = dict(weights)
                check_names(self._loaded | changed, self._spec.checkpoint)
                self._reload(self._loaded | changed)
                self._settle(())
                return
            if self._plan is None:
                raise WeightSyncError("A part of the weights was sent before all of them.")
            devices = set()
            for name, tensor in weights:
                expected = self._spec.checkpoint
                check_names({name: tensor}, {key: expected[key] for key in (name,) if key in expected})
                self._plan.apply_part(name, tensor)
                devices.add(tensor.device)
            self._settle(torch.empty(0, device=device) for device in devices)

    def load_adapter(self, layers: Sequence[AdapterLayer], flat: torch.Tensor) -> None:
        """See :meth:`colocate_rl.engine.protocol.LoraEngine.load_adapter`.

        Raises:
            WeightSyncError: when the engine was built without room for the adapter, or has no place for a layer.
        """
        if self._spec.lora is None:
            raise WeightSyncError("An adapter was sent to an engine that was built without room for one.")
        with self._entered():
            if self._slot is None:
                self._slot = AdapterSlot(self._model, layers, self._spec.tensor_parallel_size)
                self._adapter = adapter_request()
            self._slot.load(flat)
            self._settle((flat,))

    def _settle(self, sources: Iterable[torch.Tensor]) -> None:
        """Waits until everything sent has arrived, and forgets what was computed from the old values."""
        if self._device is not None:
            for device in {self._device, *(tensor.device for tensor in sources if tensor.is_cuda)}:
                torch.cuda.synchronize(device)
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("The engine kept its prefix cache, whose values belong to the old weights.")

    def _reload(self, named: Mapping[str, torch.Tensor]) -> None:
        """Through vLLM's own reload, which repacks weights where the backend needs it."""
        recorder = CopyRecorder(named)
        _unpack_experts(self._model)
        with torch.no_grad(), without_slots(self._model), contextlib.nullcontext() if self._checked else recorder:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named.items())})
            _repack_tied(self._model)
        self._slot = self._adapter = None  # vLLM may have emptied it
        if not self._checked:
            check_consumption(recorder, named, self._spec.tensor_parallel_size)
            self._checked = True

    def reseed(self, seed: int) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.reseed`."""
        with self._entered():  # vLLM draws from all three, whichever its sampler is
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)

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
            self._plan = self._slot = self._model = self._lean = self._llm = None
            self._loaded = {}
            gc.collect()
            leave_groups()
        self._folder.cleanup()


def _itself(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _unpack_experts(model: torch.nn.Module) -> None:
    """Lets layers of experts pack their weights again after a reload.

    vLLM packs them where it makes such a layer's kernel, which it does once; later weights would stay as they come, and
    the kernel would read them as packed ones.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


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
    return request.token_ids, sampling_parameters(n=request.num_completions, seed=request.seed, **values)
