"""Requests for both ways to generate, and what must hold after each call."""

from collections import Counter
from typing import Any

import pytest

from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import EngineError
from tests.engine.conftest import prompts

Answers = list[list[Completion]]

RAGGED = [prompt[: 3 + 7 * place % 40] for place, prompt in enumerate(prompts(12, length=45))]
STOPS = tuple(range(0, 250, 40))
SMALL_BLOCKS = {"block_size": 32}
SMALL_CACHE = {**SMALL_BLOCKS, "num_gpu_blocks_override": 40}

CASES = {
    "greedy": ([Request(p, 1) for p in RAGGED], SamplingSpec(max_tokens=70, temperature=0.0)),
    "one request": ([Request(RAGGED[3], 1)], SamplingSpec(max_tokens=40)),
    "one token": ([Request(p, 2) for p in RAGGED], SamplingSpec(max_tokens=1)),
    "seeds": ([Request(p, 8, seed=100 * n) for n, p in enumerate(RAGGED)], SamplingSpec(max_tokens=40)),
    "some seeds": ([Request(p, 2, seed=n if n % 2 else None) for n, p in enumerate(RAGGED)], SamplingSpec(40)),
    "eight of each": ([Request(p, 8) for p in RAGGED], SamplingSpec(max_tokens=70)),
    "nucleus": ([Request(p, 4) for p in RAGGED], SamplingSpec(max_tokens=50, temperature=0.7, top_p=0.8)),
    "top k": ([Request(p, 2) for p in RAGGED], SamplingSpec(max_tokens=50, top_k=5, repetition_penalty=1.2)),
    "min p": ([Request(p, 2) for p in RAGGED], SamplingSpec(max_tokens=50, min_p=0.1)),
    "stop tokens": ([Request(p, 4) for p in RAGGED], SamplingSpec(max_tokens=70, stop_token_ids=STOPS)),
    "no early stop": (
        [Request(p, 4) for p in RAGGED],
        SamplingSpec(max_tokens=70, stop_token_ids=STOPS, extra={"min_tokens": 20}),
    ),
    "model's length": ([Request(p, 2) for p in RAGGED], SamplingSpec(max_tokens=126)),
}  # fmt: skip


def core_of(engine: VllmEngine) -> Any:
    return engine._llm.llm_engine.engine_core.engine_core


def by_both(engine: VllmEngine, requests: list[Request], sampling: SamplingSpec) -> tuple[Answers, Answers]:
    """The same requests from the same cache and the same place of the random stream, lean first."""
    lean, answers = engine._lean, []
    assert lean is not None
    for way in (lean, None):
        engine._lean = way
        assert engine._llm.reset_prefix_cache()
        engine.reseed(5)
        answers.append(engine.generate(requests, sampling))
    engine._lean = lean
    return answers[0], answers[1]


def nothing_left(engine: VllmEngine) -> bool:
    core, outputs = core_of(engine), engine._llm.llm_engine.output_processor
    return (
        not core.scheduler.requests
        and type(outputs).__name__ == "OutputProcessor"
        and not outputs.has_unfinished_requests()
        and "update_from_output" not in vars(core.scheduler)
        and "schedule" not in vars(core.scheduler)
        and "allocate_slots" not in vars(core.scheduler.kv_cache_manager)
    )


def break_and_go_on(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, sampling = CASES["seeds"]
    expected = engine.generate(requests, sampling)
    core = core_of(engine)
    for owner, name, which in (
        (core.model_executor, "execute_model", 9),
        (core.model_executor, "sample_tokens", 9),
        (core.scheduler, "schedule", 2),  # not called for plain decode steps
        (core.scheduler.kv_cache_manager, "take_new_block_ids", 9),
    ):
        method, calls = getattr(owner, name), Counter[str]()

        def breaking(*args: Any, method: Any = method, calls: Any = calls, which: int = which, **kwargs: Any) -> Any:
            calls["made"] += 1
            if calls["made"] == which:
                raise ValueError("out of luck")
            return method(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaking)
            with pytest.raises(EngineError, match="out of luck"):
                engine.generate(requests, sampling)
        assert nothing_left(engine)
        assert engine.generate(requests, sampling) == expected
    with pytest.raises(EngineError, match=r"maximum (model|context) length"):
        engine.generate([*requests, Request([1] * 500, 2)], sampling)
    assert nothing_left(engine)
    assert engine.generate(requests, sampling) == expected


def schedule_asynchronously(engine: type[VllmEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines on CPU schedule a step before the last one's tokens are known, as they do on GPUs."""
    build = engine._build

    class Ready:
        def synchronize(self) -> None: ...

    def patched(self: VllmEngine) -> None:
        import vllm.v1.worker.gpu_model_runner as runner  # noqa: TID251
        from vllm.platforms.cpu import CpuPlatform  # noqa: TID251

        check = CpuPlatform.check_and_update_config

        def asynchronous(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        class OnCpu(runner.AsyncGPUModelRunnerOutput):
            def __init__(self, model_runner_output: Any, sampled_token_ids: Any, logprobs_tensors: Any, **others: Any):
                self._model_runner_output = model_runner_output
                self._invalid_req_indices = others["invalid_req_indices"]
                self.vocab_size = others["vocab_size"]
                self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids
                self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
                self._num_nans = self._num_nans_cpu = self._has_fault = None
                self._routed_experts = self._routed_experts_cpu = None
                self.async_copy_ready_event = Ready()

        monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(asynchronous))
        monkeypatch.setattr(runner, "AsyncGPUModelRunnerOutput", OnCpu)
        monkeypatch.setattr(runner.GPUModelRunner, "_get_or_create_async_output_copy_stream", lambda self: None)
        build(self)

    monkeypatch.setattr(engine, "_build", patched)
