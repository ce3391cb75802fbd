"""Lean generation gives what ``LLM.generate`` gives: ids, log-probabilities and finish reasons, bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest

from colocate_rl.engine.lean import LeanGenerator
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import EngineError
from tests.engine.conftest import engine_spec, weights
from tests.engine.ways import CASES, RAGGED, SMALL_BLOCKS, STOPS, break_and_go_on, by_both, core_of, nothing_left
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """One for all tests here; small blocks, so that completions fill several."""
    model = tiny_model()
    engine = VllmEngine(engine_spec(model, extra=SMALL_BLOCKS))
    engine.load_weights(weights(model))
    yield engine
    engine.close()


def test_the_steps_of_the_installed_vllm_are_known(engine: VllmEngine) -> None:
    assert engine._lean is not None
    assert engine._lean.obstacle is None
    assert engine._lean._steps is not None
    assert engine._lean._steps.decoding is not None


@pytest.mark.parametrize("case", CASES)
def test_both_ways_give_the_same(engine: VllmEngine, case: str) -> None:
    lean, usual = by_both(engine, *CASES[case])
    assert lean == usual
    assert [len(answer) for answer in lean] == [request.num_completions for request in CASES[case][0]]
    assert {type(token) for answer in lean for one in answer for token in one.token_ids} == {int}
    assert {type(logprob) for answer in lean for one in answer for logprob in one.sampling_logprobs} == {float}
    assert nothing_left(engine)


def test_completions_end_as_they_should(engine: VllmEngine) -> None:
    requests, sampling = CASES["stop tokens"]
    answers = [one for answer in engine.generate(requests, sampling) for one in answer]
    assert {one.finish_reason for one in answers} == {"stop", "length"}
    for one in answers:
        assert not set(one.token_ids[:-1]) & set(STOPS)
        assert (one.finish_reason == "stop") == (one.token_ids[-1] in STOPS)
        assert one.finish_reason == "stop" or len(one.token_ids) == 70
    for request, answer in zip(*[CASES["model's length"][0]], engine.generate(*CASES["model's length"]), strict=True):
        assert {len(one.token_ids) for one in answer} == {min(126, 128 - len(request.token_ids))}


def test_a_completions_seed_is_the_requests_plus_its_number(engine: VllmEngine) -> None:
    together = engine.generate([Request(RAGGED[0], 8, seed=40)], SamplingSpec(max_tokens=12))[0]
    alone = engine.generate([Request(RAGGED[0], 1, seed=40 + j) for j in range(8)], SamplingSpec(max_tokens=12))
    assert [one.token_ids for one in together] == [one.token_ids for answer in alone for one in answer]


@pytest.mark.parametrize("lean", [True, False])
def test_after_an_error_the_engine_goes_on_without_the_broken_requests(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, lean: bool
) -> None:
    way = engine._lean
    engine._lean = way if lean else None
    try:
        break_and_go_on(engine, monkeypatch)
    finally:
        engine._lean = way


def test_an_interrupt_is_not_turned_into_an_error(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(core_of(engine).model_executor, "execute_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(*CASES["greedy"])
    assert nothing_left(engine)


def test_an_engine_arranged_otherwise_is_refused(engine: VllmEngine) -> None:
    class Elsewhere:
        llm_engine = type("Engine", (), {"engine_core": object(), "output_processor": None})

    with pytest.raises(EngineError, match="does not run in this process"):
        LeanGenerator(Elsewhere)
