"""Our sampling kernels: the distribution, the log-probability, and what decides a draw; then in an engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.sampling import runner_of, vllms_sampler
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.gpu.conftest import gpu_model, needs_two_gpus, weights
from tests.sampling import chi_square, kernel_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Build = Callable[..., VllmEngine]


@pytest.mark.parametrize("case", kernel_cases(rows=20_000), ids=str)
def test_tokens_are_drawn_from_the_softmax(case: Any) -> None:
    from colocate_rl.engine.kernels import draw

    case.check(draw, torch.device("cuda", 0))


@needs_two_gpus
def test_the_kernels_run_on_the_engines_device() -> None:
    from colocate_rl.engine.kernels import draw

    with torch.cuda.device(1):
        kernel_cases(rows=2_000)[0].check(draw, torch.device("cuda", 1))


def sampler_of(engine: VllmEngine) -> Any:
    return runner_of(engine._llm.llm_engine.engine_core.engine_core).sampler


@pytest.fixture
def newer_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


@pytest.mark.usefixtures("newer_runner")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_samples_what_the_policy_gives(build: Build, eager: bool, temperature: float) -> None:
    model = gpu_model(torch.float32)
    engine = build(model, enforce_eager=eager, max_num_seqs=256)
    engine.load_weights(weights(model))
    assert type(sampler_of(engine)).__name__ == "PlainSampler"
    prompt, count = list(range(40, 60)), 4096
    (answers,) = engine.generate([Request(prompt, count)], SamplingSpec(max_tokens=1, temperature=temperature))
    tokens = torch.tensor([answer.token_ids[0] for answer in answers])
    logprobs = torch.tensor([answer.sampling_logprobs[0] for answer in answers])
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda:0")).logits[0, -1].double().cpu()
    expected = (logits / temperature).log_softmax(-1)
    assert (expected[tokens] - logprobs).abs().mean() < 0.05  # the engine computes in bfloat16
    own = torch.full_like(expected, -torch.inf)
    own[tokens] = logprobs.double()  # so its own probabilities are what frequencies are held against
    seen = own > -torch.inf
    assert own[seen].exp().sum() < 1 + 1e-5
    assert chi_square(tokens, torch.where(seen, own.exp(), expected.exp())) < 6


@pytest.mark.usefixtures("newer_runner")
def test_a_seed_decides_a_completion_whatever_else_is_in_the_batch(build: Build) -> None:
    model = gpu_model()
    engine = build(model, enforce_eager=True)
    engine.load_weights(weights(model))
    sampling, prompts = SamplingSpec(max_tokens=40), [list(range(10 + shift, 30 + shift)) for shift in range(12)]
    alone = [engine.generate([Request(prompt, 2, seed=7 + place)], sampling)[0] for place, prompt in enumerate(prompts)]
    engine._llm.reset_prefix_cache()
    together = engine.generate([Request(prompt, 2, seed=7 + place) for place, prompt in enumerate(prompts)], sampling)
    same = [
        one.token_ids == other.token_ids
        for pair in zip(alone, together, strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    assert sum(same) >= 20  # of 24: a batch of another size may round a logit otherwise
    assert len({tuple(answer.token_ids) for answers in together for answer in answers}) == 24


@pytest.mark.usefixtures("newer_runner")
@pytest.mark.parametrize("changes", [{"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.5}, {"repetition_penalty": 1.5}])
def test_what_changes_logits_is_left_to_vllm(build: Build, changes: dict[str, float]) -> None:
    model = gpu_model()
    engine = build(model, enforce_eager=True)
    engine.load_weights(weights(model))
    sampler, ours = sampler_of(engine), 0

    def count(*arguments: Any) -> Any:
        nonlocal ours
        ours += 1
        return own(*arguments)

    own, sampler.own_draw = sampler.own_draw, count
    requests = [Request(list(range(40 + shift, 60 + shift)), 1, seed=5 + shift) for shift in range(8)]
    answers = engine.generate(requests, SamplingSpec(max_tokens=20, **changes))  # type: ignore[arg-type]
    assert ours == 0
    with vllms_sampler(runner_of(engine._llm.llm_engine.engine_core.engine_core)):
        engine._llm.reset_prefix_cache()
        assert engine.generate(requests, SamplingSpec(max_tokens=20, **changes)) == answers  # type: ignore[arg-type]
    engine.generate(requests, SamplingSpec(max_tokens=20))
    assert ours >= 20
