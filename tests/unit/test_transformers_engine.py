"""The policy as an engine samples what its own probabilities say, alone or in a batch."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.engine.transformers_engine import TransformersEngine, invert
from colocate_rl.training import attention
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit

PROMPTS = [[7], [7, 7, 3], [200, 4, 31, 7, 7, 90, 12], [11, 12], list(range(40, 60)), [250]]
"""Of very different lengths, some with a repeated token."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def engine_of(model: PreTrainedModel, **changes: Any) -> TransformersEngine:
    values: dict[str, Any] = {"seed": 1, "max_num_seqs": 64, "max_model_length": 128}
    return TransformersEngine(model, **{**values, **changes})


def ids_of(answers: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in answer] for answer in answers]


def processed(logits: torch.Tensor, seen: Sequence[int], spec: SamplingSpec) -> torch.Tensor:
    """Probabilities after penalty, temperature and filters, token by token in plain Python."""
    values = logits.tolist()
    for token in set(seen):
        values[token] = (
            values[token] / spec.repetition_penalty if values[token] > 0 else (values[token] * spec.repetition_penalty)
        )
    weights = torch.tensor([value / spec.temperature for value in values], dtype=torch.float64).softmax(-1).tolist()
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = [token for token in ranked if weights[token] >= spec.min_p * weights[ranked[0]]]
    kept = kept[: spec.top_k or len(kept)]
    mass, nucleus = sum(weights[token] for token in kept), []
    before = 0.0
    for token in kept:
        if before / mass < spec.top_p:
            nucleus.append(token)
        before += weights[token]
    result = torch.zeros(len(weights), dtype=torch.float64)
    for token in nucleus:
        result[token] = weights[token]
    return result / result.sum()


def test_greedy_completions_are_those_of_one_row_at_a_time(model: PreTrainedModel) -> None:
    answers = engine_of(model).generate([Request(p, 1) for p in PROMPTS], SamplingSpec(12, temperature=0.0))
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        ids = list(prompt)
        for token, logprob in zip(completion.token_ids, completion.sampling_logprobs, strict=True):
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            assert token == int(logprobs.argmax())
            assert logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
            ids.append(token)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.8, "temperature": 0.7},
        {"repetition_penalty": 1.3, "temperature": 1.4, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    ],
    ids=str,
)
def test_samples_and_log_probabilities_follow_the_processed_distribution(
    model: PreTrainedModel, changes: dict[str, float]
) -> None:
    spec = SamplingSpec(1, **changes)  # type: ignore[arg-type]
    count = 1500
    answers = engine_of(model, max_num_seqs=512).generate([Request(p, count) for p in PROMPTS[1:3]], spec)
    for prompt, answer in zip(PROMPTS[1:3], answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].double()
        wanted = processed(logits, prompt, spec)
        drawn = torch.zeros(len(wanted), dtype=torch.float64)
        for completion in answer:
            (token,), (logprob,) = completion.token_ids, completion.sampling_logprobs
            assert logprob == pytest.approx(float(wanted[token].log()), abs=1e-4)
            drawn[token] += 1
        assert drawn[wanted == 0].sum() == 0
        statistic, freedom = chi_square(drawn, count * wanted)
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; tokens that are expected fewer than 5 times count as one."""
    common = expected >= 5
    found = torch.cat([found[common], found[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    used = expected > 0
    return float(((found - expected).square() / expected)[used].sum()), int(used.sum()) - 1


def test_a_seeded_completion_does_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    spec = SamplingSpec(14, temperature=0.9, repetition_penalty=1.4, stop_token_ids=(9, 80))
    requests = [Request(prompt, 3, seed=1000 * number) for number, prompt in enumerate(PROMPTS)]
    together = ids_of(engine_of(model).generate(requests, spec))
    alone = [ids_of(engine_of(model, seed=9).generate([request], spec))[0] for request in requests]
    shuffled = ids_of(engine_of(model, max_num_seqs=4).generate(requests[::-1], spec))[::-1]
    assert together == alone == shuffled
    assert len({tuple(ids) for answer in together for ids in answer}) == 3 * len(PROMPTS)
    second = ids_of(engine_of(model).generate([Request(PROMPTS[0], 1, seed=1)], spec))
    assert second[0][0] == together[0][1], "copy j has seed + j"


def test_the_stream_goes_on_and_restarts_with_reseed(model: PreTrainedModel) -> None:
    engine, spec = engine_of(model), SamplingSpec(8)
    requests = [Request(prompt, 2) for prompt in PROMPTS]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = ids_of(engine.generate(requests, spec)), ids_of(engine.generate(requests, spec))
    assert first != second
    engine.reseed(1)
    torch.manual_seed(6)
    assert ids_of(engine.generate(requests, spec)) == first
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_trainers_random_state_is_left_alone(model: PreTrainedModel) -> None:
    state = torch.get_rng_state()
    engine_of(model).generate([Request(PROMPTS[0], 2)], SamplingSpec(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_completion_ends_with_its_first_stop_token(model: PreTrainedModel) -> None:
    requests = [Request(prompt, 4, seed=50 * number) for number, prompt in enumerate(PROMPTS)]
    free = engine_of(model).generate(requests, SamplingSpec(20))
    stops = {ids[len(ids) // 2] for answer in ids_of(free) for ids in answer[:2]}
    stopped = engine_of(model).generate(requests, SamplingSpec(20, stop_token_ids=tuple(sorted(stops))))
    ignoring = engine_of(model).generate(
        requests, SamplingSpec(20, stop_token_ids=tuple(sorted(stops)), extra={"ignore_eos": True})
    )
    assert ids_of(ignoring) == ids_of(free)
    for long, short in zip(chain(*free), chain(*stopped), strict=True):
        ids = list(long.token_ids)
        end = next((place + 1 for place, token in enumerate(ids) if token in stops), len(ids))
        assert list(short.token_ids) == ids[:end]
        assert list(short.sampling_logprobs) == pytest.approx(list(long.sampling_logprobs)[:end], abs=1e-5)
        assert short.finish_reason == ("stop" if end < len(ids) or ids[-1] in stops else "length")


def test_the_window_cuts_a_completion_short(model: PreTrainedModel) -> None:
    requests = [Request(PROMPTS[4], 2, seed=3), Request(PROMPTS[0], 2, seed=4)]
    wide = engine_of(model).generate(requests, SamplingSpec(16))
    narrow = engine_of(model, max_model_length=26).generate(requests, SamplingSpec(16))
    assert [len(completion.token_ids) for answer in narrow for completion in answer] == [6, 6, 16, 16]
    assert [ids[:6] for ids in ids_of(wide)[0]] == ids_of(narrow)[0]
    assert {completion.finish_reason for answer in narrow for completion in answer} == {"length"}


def test_logits_keys_of_generation_kwargs_take_effect(model: PreTrainedModel) -> None:
    requests = [Request(prompt, 4, seed=9) for prompt in PROMPTS]
    wanted = {
        token for answer in ids_of(engine_of(model).generate(requests, SamplingSpec(6))) for t in answer for token in t
    }
    spec = SamplingSpec(6, extra={"suppress_tokens": sorted(wanted)})
    found = {token for answer in ids_of(engine_of(model).generate(requests, spec)) for t in answer for token in t}
    assert found
    assert not found & wanted


def test_the_models_own_generation_config_has_no_say_and_stays(model: PreTrainedModel) -> None:
    requests = [Request(prompt, 2, seed=1) for prompt in PROMPTS]
    plain = ids_of(engine_of(model).generate(requests, SamplingSpec(8)))
    own = model.generation_config
    misleading = GenerationConfig(
        temperature=0.1, top_k=1, do_sample=True, repetition_penalty=3.0, no_repeat_ngram_size=1, eos_token_id=[1, 2]
    )
    model.generation_config = misleading
    model.train()
    try:
        assert ids_of(engine_of(model).generate(requests, SamplingSpec(8))) == plain
        assert model.generation_config is misleading
        assert model.training
    finally:
        model.generation_config = own


def test_packed_attention_generates_the_same(model: PreTrainedModel) -> None:
    requests = [Request(prompt, 2, seed=1) for prompt in PROMPTS]
    plain = ids_of(engine_of(model).generate(requests, SamplingSpec(8)))
    attention.install(model)
    try:
        assert ids_of(engine_of(model).generate(requests, SamplingSpec(8))) == plain
    finally:
        attention.uninstall(model)


def test_inversion_at_the_edges() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).repeat(4, 1)
    uniforms = torch.tensor([[0.0], [0.2499], [0.25], [1 - 2**-53]], dtype=torch.float64)
    assert invert(probabilities, uniforms)[:, 0].tolist() == [1, 1, 3, 3]
    short = probabilities * (1 - 1e-9)  # rounding: the sum is not quite 1
    assert invert(short, uniforms)[:, 0].tolist() == [1, 1, 3, 3]
