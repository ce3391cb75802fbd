"""Lean generation in engines of other kinds: a small cache, steps scheduled ahead, an unknown vLLM, a broken way."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from colocate_rl.engine import known
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.steps import Steps
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.engine.conftest import weights
from tests.engine.ways import (
    CASES,
    RAGGED,
    SMALL_BLOCKS,
    SMALL_CACHE,
    break_and_go_on,
    by_both,
    core_of,
    nothing_left,
    schedule_asynchronously,
)
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Build = Callable[..., VllmEngine]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def counted_preemptions(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    scheduler, count = core_of(engine).scheduler, Counter[str]()
    preempt = scheduler._preempt_request

    def counting(*args: Any, **kwargs: Any) -> Any:
        count["preempted"] += 1
        return preempt(*args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counting)
    return count


MANY = [Request(RAGGED[n % 12], 1) for n in range(300)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_requests_than_fit_wait_and_are_preempted(
    build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine = build(model, extra=SMALL_CACHE)
    engine.load_weights(weights(model))
    preemptions = counted_preemptions(engine, monkeypatch)
    lean, usual = by_both(engine, MANY, SamplingSpec(max_tokens=60, temperature=temperature, stop_token_ids=(3, 5)))
    assert preemptions["preempted"] > 10
    assert lean == usual
    assert nothing_left(engine)


def test_asynchronous_scheduling_gives_the_same(
    build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule_asynchronously(VllmEngine, monkeypatch)
    engine = build(model, extra=SMALL_CACHE)
    engine.load_weights(weights(model))
    assert type(core_of(engine).scheduler).__name__ == "AsyncScheduler"
    assert engine._lean is not None
    assert engine._lean.obstacle is None
    for requests, sampling in CASES.values():
        lean, usual = by_both(engine, requests, sampling)
        assert lean == usual
        assert nothing_left(engine)
    preemptions = counted_preemptions(engine, monkeypatch)
    lean, usual = by_both(engine, MANY, SamplingSpec(max_tokens=60, stop_token_ids=(3, 5)))
    assert preemptions["preempted"] > 10
    assert lean == usual
    break_and_go_on(engine, monkeypatch)


def test_the_own_stream_goes_on_and_is_the_same_in_both_ways(build: Build, model: PreTrainedModel) -> None:
    samples = []
    for lean in (True, False):
        engine = build(model, lean=lean)
        engine.load_weights(weights(model))
        assert (engine._lean is not None) == lean
        calls = [engine.generate([Request(RAGGED[0], 4)], SamplingSpec(max_tokens=16))[0] for _ in range(3)]
        samples.append([tuple(one.token_ids) for call in calls for one in call])
        engine.close()
    assert samples[0] == samples[1]
    assert len(set(samples[0])) == 12


def test_an_unknown_schedule_stays_with_vllm(
    build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "SCHEDULES", {**known.SCHEDULES, "CachedRequestData": "0123456789ab"})
    engine = build(model, extra=SMALL_BLOCKS)
    engine.load_weights(weights(model))
    assert engine._lean is not None
    assert engine._lean.obstacle is None
    assert engine._lean._steps is not None
    assert engine._lean._steps.decoding is None
    lean, usual = by_both(engine, *CASES["seeds"])
    assert lean == usual


def test_steps_of_an_unknown_vllm_stay_with_it(
    build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "KNOWN", {**known.KNOWN, "check_stop": "0123456789ab"})
    engine = build(model, extra=SMALL_BLOCKS)
    engine.load_weights(weights(model))
    assert engine._lean is not None
    assert engine._lean.obstacle == "this vLLM has other versions of check_stop"
    for case in ("seeds", "stop tokens"):
        lean, usual = by_both(engine, *CASES[case])
        assert lean == usual


def test_a_way_that_samples_something_else_is_given_up(
    build: Build, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = Steps._append

    def wrong(self: Steps, scheduled: Any, sampled: Any) -> Any:
        left = append(self, scheduled, sampled)
        for sequence in self._sequences.values():
            sequence.logprobs = [logprob - 0.1 for logprob in sequence.logprobs]
        return left

    monkeypatch.setattr(Steps, "_append", wrong)
    with caplog.at_level(logging.WARNING, logger="colocate_rl"):
        engine = build(model)
    assert engine._lean is None
    assert "log-probabilities differ from those of LLM.generate" in caplog.text
    engine.load_weights(weights(model))
    assert len(engine.generate([Request(RAGGED[0], 3)], SamplingSpec(max_tokens=4))[0]) == 3
    assert nothing_left(engine)
