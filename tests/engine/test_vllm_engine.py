"""A real engine against the policy: weights, greedy text, log-probabilities, and nothing left behind."""

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist  # noqa: TID251
import torch.distributed.distributed_c10d as c10d  # noqa: TID251
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from colocate_rl.engine.protocol import Request, SamplingSpec
from colocate_rl.engine.sampling import is_plain
from colocate_rl.engine.vllm_engine import VllmEngine
from colocate_rl.errors import EngineError, WeightSyncError
from colocate_rl.training.merging import policy_tensors
from tests.engine.conftest import greedy_by_engine, greedy_by_policy, policy_logprobs, prompts, weights
from tests.tiny import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Build = Callable[..., VllmEngine]


def shift(model: PreTrainedModel, number: int) -> None:
    """Adds a different constant to every parameter."""
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number * (1 + position % 7))


def shuffle(model: PreTrainedModel, seed: int) -> None:
    """Changes the weights enough to change every greedy continuation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std())


def engine_tensors(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Every weight of the engine's model, read back from packed layers by multiplying the identity."""
    found = {}
    with engine._process.entered(), torch.no_grad():
        for name, parameter in engine._model.named_parameters():
            if parameter.numel():
                found[name] = parameter.detach().clone()
        for name, module in engine._model.named_modules():
            if hasattr(module, "cpu_linear") and hasattr(module, "input_size"):
                identity = torch.eye(module.input_size)
                found[f"{name}.weight"] = module.quant_method.apply(module, identity, bias=None).t().clone()
        head = engine._model.lm_head
        found["lm_head.weight"] = head.quant_method.apply(head, torch.eye(head.embedding_dim), bias=None).t().clone()
    return found


def expected_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The same weights as vLLM fuses them, from the policy."""
    own = dict(weights(model))
    own.setdefault("lm_head.weight", own["model.embed_tokens.weight"])
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    expected = {}
    for name, tensor in own.items():
        for target, parts in fused.items():
            if f".{parts[0]}." in name:
                tensor = torch.cat([own[name.replace(parts[0], part)] for part in parts])
                name = name.replace(parts[0], target)
        if not any(f".{part}." in name for parts in fused.values() for part in parts):
            expected[name] = tensor
    return expected


@pytest.mark.parametrize("tied", [True, False])
def test_every_engine_tensor_equals_the_policys_after_each_sync(build: Build, tied: bool) -> None:
    model = tiny_model(tied=tied)
    engine = build(model)
    for number in range(1, 4):
        shift(model, number)
        engine.load_weights(weights(model))
        found, expected = engine_tensors(engine), expected_tensors(model)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            rows = tensor.shape[0]  # vLLM pads the vocabulary
            torch.testing.assert_close(found[name][:rows], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_greedy_text_follows_each_sync_and_not_a_withheld_one(build: Build) -> None:
    model = tiny_model(tied=False)
    engine = build(model)
    asked = prompts(4)
    for number in range(3):
        before = greedy_by_engine(engine, asked) if number else None
        shuffle(model, number)
        wanted = [greedy_by_policy(model, prompt, 16) for prompt in asked]
        if before is not None:
            assert greedy_by_engine(engine, asked) == before  # withheld: still the old weights
            assert before != wanted
        engine.load_weights(weights(model))
        assert greedy_by_engine(engine, asked) == wanted


@pytest.mark.parametrize("kind", [Qwen3MoeConfig, MixtralConfig])
def test_experts_follow_each_sync(build: Build, kind: type[PretrainedConfig]) -> None:
    """transformers holds them in one parameter, vLLM reads them one by one and packs them for its CPU kernel."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(kind(vocab_size=288, **sizes, **heads, **experts), dtype=torch.float32)
    engine = build(model)
    (asked,) = prompts(1)
    for number in range(3):
        shuffle(model, number)
        engine.load_weights((tensor.name, tensor.base()) for tensor in policy_tensors(model))
        ((answer,),) = engine.generate([Request(asked, 1, seed=number)], SamplingSpec(max_tokens=8))
        found = torch.tensor(answer.sampling_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, policy_logprobs(model, asked, list(answer.token_ids)), rtol=1e-4, atol=1e-4)


def test_prefix_cache_does_not_outlive_a_sync(build: Build) -> None:
    model = tiny_model()
    engine = build(model)
    asked = prompts(2, length=80)  # several cache blocks
    engine.load_weights(weights(model))
    greedy_by_engine(engine, asked)
    greedy_by_engine(engine, asked)
    shuffle(model, 5)
    engine.load_weights(weights(model))
    assert greedy_by_engine(engine, asked) == [greedy_by_policy(model, prompt, 16) for prompt in asked]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_logprobs_are_the_policys(build: Build, temperature: float) -> None:
    model = tiny_model()
    engine = build(model)
    engine.load_weights(weights(model))
    asked = prompts(4)
    answers = engine.generate(
        [Request(prompt, 4) for prompt in asked], SamplingSpec(max_tokens=24, temperature=temperature)
    )
    for prompt, answer in zip(asked, answers, strict=True):
        for completion in answer:
            policy = policy_logprobs(model, prompt, list(completion.token_ids), temperature)
            sampled = torch.tensor(completion.sampling_logprobs, dtype=torch.float64)
            assert float((policy - sampled).abs().max()) <= 1e-4


def test_completions_end_at_any_stop_token_and_keep_it(build: Build) -> None:
    model = tiny_model()
    engine = build(model)
    engine.load_weights(weights(model))
    free = engine.generate([Request(prompts(1)[0], 1)], SamplingSpec(max_tokens=12, temperature=0.0))[0][0]
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    stop = free.token_ids[5]
    cut = engine.generate(
        [Request(prompts(1)[0], 1)], SamplingSpec(max_tokens=12, temperature=0.0, stop_token_ids=(stop, 256))
    )[0][0]
    first = list(free.token_ids).index(stop)
    assert cut.finish_reason == "stop"
    assert list(cut.token_ids) == list(free.token_ids[: first + 1])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_requests_are_as_plain_for_the_engines_core_as_they_were_asked_for(
    build: Build, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine = build(tiny_model())
    engine.load_weights(weights(tiny_model()))
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    add, arrived = scheduler.add_request, []

    def watched(request: Any, *others: Any, **named: Any) -> Any:
        arrived.append(is_plain(request.sampling_params))
        return add(request, *others, **named)

    monkeypatch.setattr(scheduler, "add_request", watched)
    spec = SamplingSpec(max_tokens=3, temperature=temperature, stop_token_ids=(5,))
    engine.generate([Request(list(range(10, 20)), 1), Request(list(range(10, 22)), 1, seed=3)], spec)
    assert arrived == [temperature > 0] * 2


def test_request_seeds_repeat_and_differ(build: Build) -> None:
    model = tiny_model()
    engine = build(model)
    engine.load_weights(weights(model))
    prompt, sampling = prompts(1)[0], SamplingSpec(max_tokens=12)
    once = engine.generate([Request(prompt, 8, seed=100)], sampling)[0]
    again = engine.generate([Request(prompt, 4, seed=100), Request(prompt, 4, seed=104)], sampling)
    assert [c.token_ids for c in once] == [c.token_ids for answer in again for c in answer]
    assert len({tuple(c.token_ids) for c in once}) == 8


def test_engines_of_one_run_and_calls_of_one_engine_never_repeat_samples(build: Build) -> None:
    model = tiny_model()
    prompt, sampling = prompts(1)[0], SamplingSpec(max_tokens=16)
    samples = []
    for seed in (1, 2, 1):
        engine = build(model, seed=seed)
        engine.load_weights(weights(model))
        for _ in range(2):
            samples.append([tuple(c.token_ids) for c in engine.generate([Request(prompt, 4)], sampling)[0]])
        engine.close()
    first, second, other, _, repeat, _ = samples
    assert not set(first) & set(second)
    assert not set(first) & set(other)
    assert first == repeat


def test_weights_that_do_not_fit_are_refused_by_name(build: Build) -> None:
    model = tiny_model()
    engine = build(model)
    good = dict(weights(model))
    name = "model.layers.1.self_attn.k_proj.weight"
    renamed = {f"module.{n}" if n == name else n: t for n, t in good.items()}
    dropped = {n: t for n, t in good.items() if n != name}
    misshaped = {n: t[:-1] if n == name else t for n, t in good.items()}
    for wrong in (renamed, dropped, misshaped):
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            engine.load_weights(wrong.items())
    engine.load_weights(good.items())


def test_a_closed_engine_says_so_whatever_it_is_asked(build: Build) -> None:
    model = tiny_model()
    engine = build(model)
    engine.close()
    engine.close()
    for ask in (
        lambda: engine.generate([Request(prompts(1)[0], 2)], SamplingSpec(max_tokens=4)),
        lambda: engine.load_weights(weights(model)),
        lambda: engine.update_weights(weights(model)),
        lambda: engine.reseed(1),
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            ask()


def process_state() -> dict[str, object]:
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set threads": torch.set_num_threads,
        "affinity": os.sched_getaffinity(0),
        "dtype": torch.get_default_dtype(),
        "rank": dist.get_rank(),
        "world size": dist.get_world_size(),
        "counter": c10d._world.group_count,
        "groups": dict(c10d._world.pg_map),
        "default": dist.group.WORLD,
    }


def test_the_process_is_as_before_and_can_make_groups(build: Build, tmp_path: os.PathLike[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_model()
        before = process_state()
        engine = build(model)
        assert process_state() == before
        engine.load_weights(weights(model))
        engine.generate([Request(prompts(1)[0], 2)], SamplingSpec(max_tokens=4))
        assert process_state() == before
        with pytest.raises(WeightSyncError):
            engine.load_weights([])
        assert process_state() == before
        engine.close()
        assert process_state() == before
        group = dist.new_group([0])
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == 1.0
    finally:
        dist.destroy_process_group()
