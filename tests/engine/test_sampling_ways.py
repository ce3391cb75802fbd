"""The policy as an engine, vLLM's engine, and vLLM on transformers' code agree; structured outputs are obeyed."""

import itertools
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import Completion, Request, SamplingSpec
from colocate_rl.engine.transformers_engine import TransformersEngine
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.engine.conftest import GREEDY, engine_spec, policy_logprobs, prompts, weights
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

EOS = 256


@pytest.fixture(scope="module")
def with_tokenizer() -> Iterator[VllmEngine]:
    engine = VllmEngine(engine_spec(tiny_model(), tokenizer=tiny_tokenizer()))
    engine.load_weights(weights(tiny_model()))
    yield engine
    engine.close()


def requests(copies: int = 1) -> list[Request]:
    return [
        Request(prompt[: 3 + 2 * number], copies, seed=100 * number)
        for number, prompt in enumerate(prompts(4, length=12))
    ]


def test_greedy_texts_of_the_policy_and_of_vllm_are_equal(with_tokenizer: VllmEngine) -> None:
    own = TransformersEngine(tiny_model(), seed=1, max_num_seqs=8, max_model_length=128)
    for spec in (GREEDY, SamplingSpec(max_tokens=16, temperature=0.0, repetition_penalty=1.5)):
        for (mine,), (theirs,) in zip(
            own.generate(requests(), spec), with_tokenizer.generate(requests(), spec), strict=True
        ):
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason == theirs.finish_reason
            assert list(mine.sampling_logprobs) == pytest.approx(list(theirs.sampling_logprobs), abs=1e-4)


def test_filters_give_vllm_s_log_probabilities(with_tokenizer: VllmEngine) -> None:
    """Both report log-probabilities after all filters: the policy, asked for vLLM's own tokens, must find the same."""
    spec = SamplingSpec(max_tokens=1, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.4)
    own = TransformersEngine(tiny_model(), seed=1, max_num_seqs=4096, max_model_length=128)
    theirs = with_tokenizer.generate(requests(8), spec)
    mine = own.generate([Request(request.token_ids, 800) for request in requests()], spec)
    compared = 0
    for answer, pool in zip(theirs, mine, strict=True):
        known = {tuple(c.token_ids): c.sampling_logprobs[0] for c in pool}
        for completion in answer:
            if tuple(completion.token_ids) in known:
                assert completion.sampling_logprobs[0] == pytest.approx(known[tuple(completion.token_ids)], abs=1e-3)
                compared += 1
    assert compared >= 24, "nearly all of vLLM's tokens should be among 800 draws"


@pytest.mark.parametrize("regex", [r"-?[0-9]{1,5}", r"(yes|no)!"])
def test_a_regular_expression_is_obeyed(with_tokenizer: VllmEngine, regex: str) -> None:
    spec = SamplingSpec(max_tokens=24, stop_token_ids=(EOS,), extra={"structured_outputs": {"regex": regex}})
    answers = with_tokenizer.generate(requests(6), spec)
    texts = set()
    for completion in (completion for answer in answers for completion in answer):
        text = tiny_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        assert re.fullmatch(regex, text), text
        assert (completion.token_ids[-1], completion.finish_reason) == (EOS, "stop")
        texts.add(text)
    assert len(texts) > 1
    free = with_tokenizer.generate(requests(), SamplingSpec(max_tokens=24, stop_token_ids=(EOS,)))
    assert not any(re.match(regex, tiny_tokenizer().decode(answer[0].token_ids)) for answer in free)


def test_constrained_log_probabilities_are_those_of_the_allowed_tokens(with_tokenizer: VllmEngine) -> None:
    spec = SamplingSpec(max_tokens=4, stop_token_ids=(EOS,), extra={"structured_outputs": {"regex": "[ab]"}})
    letters = tiny_tokenizer()("ab")["input_ids"]
    for request, answer in zip(requests(), with_tokenizer.generate(requests(), spec), strict=True):
        (completion,) = answer
        both = [policy_logprobs(tiny_model(), list(request.token_ids), [letter]) for letter in letters]
        wanted = torch.cat(both).log_softmax(-1)[letters.index(completion.token_ids[0])]
        assert completion.sampling_logprobs[0] == pytest.approx(float(wanted), abs=1e-3)
        assert completion.sampling_logprobs[1] == pytest.approx(0.0, abs=1e-5)


def test_a_seed_repeats_constrained_completions_however_long_grammars_take(
    with_tokenizer: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that share a stream must run in the order they were asked in, not in that of compiling threads."""
    spec = SamplingSpec(max_tokens=24, stop_token_ids=(EOS,), extra={"structured_outputs": {"regex": "[a-z]{5,9}"}})
    asked = [Request(prompt, 4) for prompt in prompts(4)]
    with_tokenizer.generate(asked, spec)  # the first request makes what compiles
    assert with_tokenizer._llm is not None
    compiler = with_tokenizer._llm.llm_engine.engine_core.engine_core.structured_output_manager.backend
    compile_grammar = compiler.compile_grammar

    def answers(delays: list[float]) -> list[list[Completion]]:
        waits = itertools.cycle(delays)

        def slowly(*arguments: Any, **named: Any) -> Any:
            time.sleep(next(waits))
            return compile_grammar(*arguments, **named)

        monkeypatch.setattr(compiler, "compile_grammar", slowly)
        with_tokenizer.reseed(5)
        return with_tokenizer.generate(asked, spec)

    expected = answers([0.0])
    assert answers([0.1, 0.0, 0.03, 0.0]) == expected
    assert answers([0.0, 0.02]) == expected


def test_lean_generation_and_llm_generate_constrain_alike(
    with_tokenizer: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SamplingSpec(max_tokens=24, stop_token_ids=(EOS,), extra={"structured_outputs": {"regex": "[a-f]{2,9}"}})
    assert with_tokenizer._lean is not None
    lean = with_tokenizer.generate(requests(4), spec)
    monkeypatch.setattr(with_tokenizer, "_lean", None)
    assert with_tokenizer.generate(requests(4), spec) == lean


def test_transformers_code_inside_vllm_follows_the_policy() -> None:
    engine = BackgroundEngine(engine_spec(tiny_model(), model_impl="transformers"))
    try:
        for seed in (0, 3):
            model = tiny_model(seed)
            engine.load_weights(weights(model))
            own = TransformersEngine(model, seed=1, max_num_seqs=8, max_model_length=128)
            wanted = [answer[0].token_ids for answer in own.generate(requests(), GREEDY)]
            assert [answer[0].token_ids for answer in engine.generate(requests(), GREEDY)] == wanted
    finally:
        engine.close()
