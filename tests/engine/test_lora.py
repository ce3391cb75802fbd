"""Adapters in a real engine: after each sync it computes what the policy computes, whichever way the adapter came."""

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig

from colocate_rl import GRPOConfig
from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import AdapterLayer, Request, SamplingSpec
from colocate_rl.engine.spec import LoraSpec
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import WeightSyncError
from colocate_rl.senders import LoraSender
from colocate_rl.training.loading import load_models
from colocate_rl.training.merging import policy_tensors
from tests.engine.conftest import engine_spec, policy_logprobs, prompts, weights
from tests.lora import LINEAR, lora_policy, move
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

SLOT = LoraSpec(16, LINEAR)
PROMPTS = prompts(6)
GREEDY = SamplingSpec(max_tokens=12, temperature=0.0)
CASES: dict[str, dict[str, Any]] = {
    "every linear layer": {},
    "two layers": {"target_modules": ["q_proj", "down_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2, "up_proj": 8}, "alpha_pattern": {"v_proj": 2}, "use_rslora": True},
    "norm as a whole": {"modules_to_save": ["norm"]},
    "biases": {"bias": "all", "target_modules": ["q_proj", "v_proj"]},
}  # fmt: skip
UNTIED: dict[str, dict[str, Any]] = {
    "head as a whole": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]},
    "embedding as a whole": {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj"]},
}
MERGED_ONLY: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
}


def largest_gap(engine: Any, policy: Any) -> float:
    """Largest difference of log-probabilities of the engine's own greedy tokens; they must be the policy's too."""
    answers = engine.generate([Request(prompt, 1) for prompt in PROMPTS], GREEDY)
    gap = 0.0
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        ids = list(answer.token_ids)
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
        gap = max(
            gap, float((policy_logprobs(policy, prompt, ids) - torch.tensor(answer.sampling_logprobs)).abs().max())
        )
    return gap


def sender(policy: PeftModel, way: str) -> LoraSender:
    return LoraSender(policy, torch.float32, merged=way == "merged")


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[bool], VllmEngine]]:
    """One engine for tied models or one for untied ones, with room for an adapter."""
    living: dict[bool, VllmEngine] = {}

    def get(tied: bool) -> VllmEngine:
        if tied not in living or living[tied]._llm is None:
            for engine in living.values():
                engine.close()
            living.clear()
            living[tied] = VllmEngine(engine_spec(tiny_model(tied=tied), lora=SLOT))
        return living[tied]

    yield get
    for engine in living.values():
        engine.close()


@pytest.mark.parametrize("way", ["merged", "adapter"])
@pytest.mark.parametrize("case", [*CASES, *UNTIED])
def test_after_each_sync_the_engine_computes_the_policy(
    engines: Callable[[bool], VllmEngine], case: str, way: str
) -> None:
    engine = engines(case in CASES)
    policy = lora_policy(tied=case in CASES, **{**CASES, **UNTIED}[case])
    sends = sender(policy, way)
    for step in range(3):
        sends.send(engine)
        assert largest_gap(engine, policy) < 1e-3
        move(policy, 2 + step)
        assert largest_gap_of_stale(engine, policy) > 1e-2


def largest_gap_of_stale(engine: VllmEngine, policy: PeftModel) -> float:
    answers = engine.generate([Request(prompt, 1) for prompt in PROMPTS], GREEDY)
    return max(
        float((policy_logprobs(policy, prompt, list(a.token_ids)) - torch.tensor(a.sampling_logprobs)).abs().max())
        for prompt, (a,) in zip(PROMPTS, answers, strict=True)
    )


@pytest.mark.parametrize("case", MERGED_ONLY)
def test_what_has_no_slot_arrives_merged(engines: Callable[[bool], VllmEngine], case: str) -> None:
    engine, policy = engines(False), lora_policy(tied=False, **MERGED_ONLY[case])
    sends = sender(policy, "merged")
    for step in range(2):
        sends.send(engine)
        assert largest_gap(engine, policy) < 1e-3
        move(policy, 2 + step)


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_only_the_active_adapter_is_sent(engines: Callable[[bool], VllmEngine], way: str) -> None:
    policy = lora_policy(tied=False, modules_to_save=["lm_head"])
    other = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy.add_adapter("other", other)
    policy.set_adapter("other")
    move(policy, 9)
    engine = engines(False)
    for name in ("other", "default"):
        policy.set_adapter(name)
        sender(policy, way).send(engine)
        assert largest_gap(engine, policy) < 1e-3


def digest(policy: PeftModel) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(policy.named_parameters()):
        if not parameter.requires_grad:
            found.update(name.encode() + parameter.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_base_weights_stay_bit_identical(engines: Callable[[bool], VllmEngine], way: str) -> None:
    policy = lora_policy(tiny_model().to(torch.bfloat16), modules_to_save=["norm"])
    engine, sends, before = engines(True), sender(policy, way), digest(policy)
    for step in range(200):
        sends.send(engine)
        if step % 20 == 0:
            move(policy, step)
    assert digest(policy) == before


def test_both_ways_agree(engines: Callable[[bool], VllmEngine]) -> None:
    engine, policy = engines(True), lora_policy(modules_to_save=["norm"])
    found = []
    for way in ("merged", "adapter"):
        sender(policy, way).send(engine)
        answers = engine.generate([Request(prompt, 1) for prompt in PROMPTS], GREEDY)
        found.append([(answer.token_ids, answer.sampling_logprobs) for (answer,) in answers])
    for (ids, logprobs), (other_ids, other_logprobs) in zip(*found, strict=True):
        assert ids == other_ids
        assert other_logprobs == pytest.approx(logprobs, abs=1e-3)


def test_lean_generation_carries_the_adapter_as_usual_generation_does(engines: Callable[[bool], VllmEngine]) -> None:
    engine, policy = engines(True), lora_policy()
    sender(policy, "adapter").send(engine)
    requests = [Request(prompt, 3, seed=11 * number) for number, prompt in enumerate(PROMPTS)]
    lean, answers = engine._lean, []
    assert lean is not None
    for way in (lean, None):
        engine._lean = way
        assert engine._llm.reset_prefix_cache()
        answers.append(engine.generate(requests, SamplingSpec(max_tokens=12)))
    engine._lean = lean
    assert answers[0] == answers[1]


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_an_engine_in_a_child_process_follows_too(way: str) -> None:
    policy = lora_policy(modules_to_save=["norm"])
    engine = BackgroundEngine(engine_spec(tiny_model(), lora=SLOT if way == "adapter" else None))
    try:
        sends = sender(policy, way)
        for step in range(3):
            sends.send(engine)
            assert largest_gap(engine, policy) < 1e-3
            move(policy, 2 + step)
    finally:
        engine.close()


def test_a_layer_without_a_slot_is_refused_by_name(engines: Callable[[bool], VllmEngine]) -> None:
    engine = engines(True)
    engine.load_weights(weights(tiny_model()))
    with pytest.raises(WeightSyncError, match=r"embed_tokens.*lora_sync='merged'"):
        engine.load_adapter([AdapterLayer("model.embed_tokens", 2, 288, 64)], torch.ones(2 * (288 + 64)))


def test_an_engine_without_room_refuses_an_adapter(engines: Callable[[bool], VllmEngine]) -> None:
    engines(True).close()
    engine = VllmEngine(engine_spec(tiny_model()))
    try:
        engine.load_weights(weights(tiny_model()))
        with pytest.raises(WeightSyncError, match="without room"):
            engine.load_adapter([AdapterLayer("model.layers.0.mlp.up_proj", 2, 64, 128)], torch.ones(2 * 192))
    finally:
        engine.close()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_quantised_base_weights_reach_the_engine_as_numbers(
    engines: Callable[[bool], VllmEngine], tmp_path: Path, way: str
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=list(LINEAR))
    loaded, _ = load_models(str(tmp_path / "model"), GRPOConfig(str(tmp_path), bf16=False), lora, bits)
    policy: Any = (
        loaded.train()
    )  # bitsandbytes packs weights anew for an evaluation on CPU, which nothing can read back
    assert any(tensor.is_quantised for tensor in policy_tensors(policy))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as a policy in bfloat16 computes, no engine does to 1e-3
    engine, sends = engines(True), sender(policy, way)
    for step in range(2):
        move(policy, 1 + step)
        sends.send(engine)
        assert largest_gap(engine, policy) < 1e-3
