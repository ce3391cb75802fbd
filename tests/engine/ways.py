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
        and "allocate_slots" not in vars(core.scheduler.kv_cache_manager)
    )


def break_and_go_on(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, sampling = CASES["seeds"]
    expected = engine.generate(requests, sampling)
    core = core_of(engine)
    for owner, name in (
        (core.model_executor, "execute_model"),
        (core.model_executor, "sample_tokens"),
        (core.scheduler, "schedule"),
    ):
        method, calls = getattr(owner, name), Counter[str]()

        def breaking(*args: Any, method: Any = method, calls: Counter[str] = calls, **kwargs: Any) -> Any:
            calls["made"] += 1
            if calls["made"] == 9:
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
