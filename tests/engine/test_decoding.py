"""Plain decode steps are scheduled as vLLM schedules them: each step, on a copy of the scheduler, field by field."""

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedModel

from colocate_rl.engine.protocol import Completion, Request, SamplingSpec, Work
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.engine.conftest import weights
from tests.engine.twins import compare_steps
from tests.engine.ways import RAGGED, SMALL_CACHE, STOPS, core_of, schedule_asynchronously
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Build = Callable[..., VllmEngine]


@pytest.fixture
def _long_chains() -> Iterator[None]:
    """The cache's free blocks are a chain, which ``deepcopy`` follows."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * limit)
    yield
    sys.setrecursionlimit(limit)


class Counting:
    """Gives one common request after the other to the only engine."""

    def __init__(self) -> None:
        self.next = itertools.count().__next__


@pytest.mark.usefixtures("_long_chains")
@pytest.mark.parametrize("ahead", [False, True])
def test_each_step_is_vllms(build: Build, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    if ahead:
        schedule_asynchronously(VllmEngine, monkeypatch)
    model: PreTrainedModel = tiny_model()
    engine = build(model, extra=SMALL_CACHE, max_num_seqs=8)
    engine.load_weights(weights(model))
    count = compare_steps(monkeypatch)
    engine.generate([Request(p, 3) for p in RAGGED[:8]], SamplingSpec(max_tokens=50, stop_token_ids=STOPS))
    assert min(count[name] for name in ("finished", "waiting", "blocks")) > 2
    engine.generate([Request(p, 1, seed=3) for p in RAGGED[:4]], SamplingSpec(max_tokens=126))
    answers: dict[int, list[Completion]] = {}
    work = Work([Request(p, 2, seed=3) for p in RAGGED], 2, Counting())
    engine.work_off(work, SamplingSpec(max_tokens=30, stop_token_ids=STOPS), answers.__setitem__)
    assert len(answers) == len(RAGGED)
    assert core_of(engine).scheduler.requests == {}
    assert count["steps"] > 150
    assert (count["idle"] > 0) == ahead
