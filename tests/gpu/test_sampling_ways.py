"""On a GPU: structured outputs, vLLM on transformers' code, and the policy as its own engine."""

import re

import pytest

from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.transformers_engine import TransformersEngine
from colocate_rl.engine.vllm_engine import VllmEngine
from tests.gpu.conftest import gpu_model, gpu_spec, weights
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

REQUESTS = [Request(list(range(10 + shift, 30 + 3 * shift)), 2, seed=100 * shift) for shift in range(4)]


def test_a_regular_expression_is_obeyed() -> None:
    model = gpu_model()
    engine = VllmEngine(gpu_spec(model, tokenizer=tiny_tokenizer()))
    try:
        engine.load_weights(weights(model))
        spec = SamplingSpec(24, stop_token_ids=(256,), extra={"structured_outputs": {"regex": "-?[0-9]{1,5}"}})
        for completion in (completion for answer in engine.generate(REQUESTS, spec) for completion in answer):
            text = tiny_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
            assert re.fullmatch("-?[0-9]{1,5}", text), text
            assert completion.finish_reason == "stop"
    finally:
        engine.close()


def test_transformers_code_inside_vllm_follows_the_policy() -> None:
    """The copy plan is recorded from another loader than for vLLM's own code."""
    engine = BackgroundEngine(gpu_spec(gpu_model(), model_impl="transformers"))
    try:
        for seed in (0, 3):
            model = gpu_model(seed=seed)
            engine.load_weights(weights(model))
            own = TransformersEngine(model, seed=1, max_num_seqs=8, max_model_length=512)
            for mine, theirs in zip(
                own.generate(REQUESTS, SamplingSpec(1, temperature=0.0)),
                engine.generate(REQUESTS, SamplingSpec(1, temperature=0.0)),
                strict=True,
            ):
                assert list(theirs[0].sampling_logprobs) == pytest.approx(list(mine[0].sampling_logprobs), abs=0.2)
    finally:
        engine.close()


def test_a_seeded_completion_of_the_policy_does_not_depend_on_the_batch() -> None:
    model = gpu_model()
    model = model.float()  # bfloat16 rounds batched products otherwise than single ones
    spec = SamplingSpec(12, stop_token_ids=(5,))
    together = TransformersEngine(model, seed=1, max_num_seqs=8, max_model_length=512).generate(REQUESTS, spec)
    alone = TransformersEngine(model, seed=2, max_num_seqs=1, max_model_length=512).generate(REQUESTS, spec)
    assert [[c.token_ids for c in answer] for answer in together] == [[c.token_ids for c in a] for a in alone]
