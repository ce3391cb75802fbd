"""The engine in a child process: the same answers, weights through shared memory, and no fault that hangs the rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config

from colocate_rl import engines
from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.claims import FileClaims
from colocate_rl.engine.protocol import Background, Request, SamplingSpec, Work
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import EngineError, NeedsOwnProcessError
from tests.engine.conftest import engine_spec, greedy_by_policy, prompts, weights
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

GREEDY = SamplingSpec(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[BackgroundEngine]:
    built = BackgroundEngine(engine_spec(tiny_model()))
    yield built
    built.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_answers_follow_the_policy_through_shared_memory(engine: BackgroundEngine) -> None:
    model = tiny_model()
    assert isinstance(engine, Background)
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.add_(torch.randn_like(parameter) * parameter.std())
        engine.load_weights(weights(model))
        before = time.monotonic()
        engine.begin(Work.of([Request(prompt, 1) for prompt in prompts(4)]), GREEDY)
        wanted = [greedy_by_policy(model, prompt, 16) for prompt in prompts(4)]  # meanwhile
        answers, span = engine.finish()
        assert [list(dict(answers)[position][0].token_ids) for position in range(4)] == wanted
        assert before < span.start < span.end < time.monotonic()


def test_a_model_that_vllm_has_no_code_for_lives_apart_from_the_policy() -> None:
    """vLLM's wrapper changes the class of the policy, whose next forward pass would fail."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Olmo2Config(vocab_size=288, **sizes), dtype=torch.float32)
    with pytest.raises(NeedsOwnProcessError, match="vLLM runs Olmo2ForCausalLM by wrapping"):
        VllmEngine(engine_spec(model), beside_policy=True)
    engine = engines._start(engine_spec(model), in_child=False)
    try:
        assert isinstance(engine, BackgroundEngine)
        engine.load_weights(weights(model))
        (answer,) = engine.generate([Request(prompts(1)[0], 1)], GREEDY)
        assert list(answer[0].token_ids) == greedy_by_policy(model, prompts(1)[0], 16)
    finally:
        engine.close()
    in_rank = engines._start(engine_spec(tiny_model()), in_child=False)
    assert isinstance(in_rank, VllmEngine)
    in_rank.close()


def test_requests_come_as_they_finish(engine: BackgroundEngine) -> None:
    model = tiny_model()
    engine.load_weights(weights(model))
    short, long = SamplingSpec(max_tokens=4), SamplingSpec(max_tokens=100)
    engine.begin(Work.of([Request(prompts(1)[0], 1)]), long)
    assert engine.poll(0.0) == []
    engine.finish()
    engine.begin(Work.of([Request(prompt, 2) for prompt in prompts(70, 2)]), short)  # 32 run at once: waves
    seen: list[int] = []
    polls = 0
    while len(seen) < 70:
        found = engine.poll(0.5)
        polls += bool(found)
        seen += [position for position, _ in found]
        assert all(len(completions) == 2 for _, completions in found)
    rest, _ = engine.finish()
    assert not rest
    assert sorted(seen) == list(range(70))
    assert polls > 1


def test_common_requests_are_taken_when_there_is_room(engine: BackgroundEngine, tmp_path: Path) -> None:
    engine.load_weights(weights(tiny_model()))
    claims = FileClaims(tmp_path / "1")
    assert [claims.next(), claims.next()] == [0, 1]  # another engine was faster
    requests = [Request(prompt, 8, seed=100 * number) for number, prompt in enumerate(prompts(12, 3))]
    engine.begin(Work(requests, 2, claims), SamplingSpec(max_tokens=8))  # 32 run at once, so 4 of these
    answers = dict(engine.finish()[0])
    assert sorted(answers) == [0, 1, *range(4, 12)]
    engine.begin(Work.of(requests), SamplingSpec(max_tokens=8))
    everything = dict(engine.finish()[0])
    for position, completions in answers.items():  # seeds decide, not when or beside what a request ran
        assert [c.token_ids for c in completions] == [c.token_ids for c in everything[position]]


def test_other_tensors_are_shared_anew(engine: BackgroundEngine) -> None:
    for seed in (3, 4):
        model = tiny_model(seed)
        engine.load_weights(weights(model))
        assert [list(a[0].token_ids) for a in engine.generate([Request(prompts(1)[0], 1)], GREEDY)] == [
            greedy_by_policy(model, prompts(1)[0], 16)
        ]


def test_nothing_may_be_asked_while_it_generates(engine: BackgroundEngine) -> None:
    engine.begin(Work.of([Request(prompts(1)[0], 1)]), GREEDY)
    with pytest.raises(EngineError, match=r"finish\(\) comes before"):
        engine.load_weights(weights(tiny_model()))
    engine.finish()


def test_an_error_in_the_child_comes_with_its_traceback_and_leaves_it_usable(engine: BackgroundEngine) -> None:
    with pytest.raises(EngineError, match="max_tokens") as caught:
        engine.generate([Request(prompts(1)[0], 1)], SamplingSpec(max_tokens=0))
    assert "In the engine's process:" in str(caught.value)
    assert 'vllm_engine.py", line' in str(caught.value)
    assert len(engine.generate([Request(prompts(1)[0], 2)], SamplingSpec(max_tokens=4))[0]) == 2


def test_a_killed_child_ends_the_call() -> None:
    engine = BackgroundEngine(engine_spec(tiny_model()))
    engine.load_weights(weights(tiny_model()))
    assert engine._process is not None
    engine._process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match="signal 9"):
        engine.generate([Request(prompts(1)[0], 1)], GREEDY)
    assert time.monotonic() - start < 10
    engine.close()


def test_a_silent_child_ends_the_call_and_is_killed() -> None:
    engine = BackgroundEngine(engine_spec(tiny_model()), silence_s=5)
    engine.load_weights(weights(tiny_model()))
    assert engine._process is not None
    process = engine._process
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match="no sign of life for 5 s"):
        engine.generate([Request(prompts(1)[0], 1)], GREEDY)
    engine.close()
    assert process.returncode == -signal.SIGKILL


ORPHAN = """
import os, signal
from colocate_rl.engine.background import BackgroundEngine
from tests.engine.conftest import engine_spec
from tests.tiny import tiny_model
engine = BackgroundEngine(engine_spec(tiny_model()))
print(engine._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_child_dies_with_its_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(pid)


def test_a_child_that_cannot_build_says_why() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(EngineError, match="float99"):
        BackgroundEngine(engine_spec(tiny_model(), dtype="float99"))
    assert set(psutil.Process().children()) == before
