"""Merged weights against PEFT's own merge, names against a checkpoint's, and factors against the layers'."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

from colocate_rl.engine.protocol import factor_views
from colocate_rl.training.merging import AdapterFactors, merged_weight, policy_tensors
from tests.lora import by_peft, lora_policy, move
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit

CASES: dict[str, dict[str, Any]] = {
    "linear": {},
    "ranks": {"rank_pattern": {"q_proj": 2, "up_proj": 8}, "alpha_pattern": {"v_proj": 2}, "use_rslora": True},
    "DoRA": {"use_dora": True},
    "biases": {"bias": "all"},
    "norm as a whole": {"modules_to_save": ["norm"]},
    "head and embedding as a whole": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_current_values_are_what_peft_merges(case: str) -> None:
    policy = lora_policy(tied=False, **CASES[case])
    expected = dict(by_peft(policy).named_parameters())
    found = {tensor.name: tensor.current("default") for tensor in policy_tensors(policy)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)
        assert not found[name].requires_grad


@pytest.mark.parametrize("case", CASES)
def test_what_moves_is_exactly_what_training_changes(case: str) -> None:
    policy = lora_policy(tied=False, **CASES[case])
    before = {tensor.name: tensor.current("default").clone() for tensor in policy_tensors(policy)}
    move(policy, 5)
    changed = {t.name for t in policy_tensors(policy) if not torch.equal(before[t.name], t.current("default"))}
    assert {tensor.name for tensor in policy_tensors(policy) if tensor.moves} == changed != set(before)


def test_layers_that_store_weights_transposed() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=288, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    policy = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    move(policy, 1)
    expected = dict(by_peft(policy).named_parameters())
    for tensor in policy_tensors(policy):
        torch.testing.assert_close(tensor.current("default"), expected[tensor.name].detach(), rtol=1e-5, atol=1e-6)


def test_a_merge_computes_in_the_wider_type_and_writes_to_nothing() -> None:
    torch.manual_seed(1)
    weight, a, b = torch.randn(24, 16).bfloat16(), torch.randn(4, 16), torch.randn(24, 4)
    kept = [tensor.clone() for tensor in (weight, a, b)]
    found = merged_weight(weight, a, b, 0.5)
    exact = weight.double() + 0.5 * b.double() @ a.double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(old, new) for old, new in zip(kept, (weight, a, b), strict=True))
    magnitude = torch.rand(24)
    rows = merged_weight(weight, a, b, 0.5, magnitude)
    torch.testing.assert_close(rows.norm(dim=1), magnitude, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(rows.double(), exact), torch.ones(24).double())


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_a_checkpoints_with_and_without_adapter(tied: bool) -> None:
    names = [name for name, _ in tiny_model(tied=tied).named_parameters()]
    assert [tensor.name for tensor in policy_tensors(tiny_model(tied=tied))] == names
    assert [tensor.name for tensor in policy_tensors(lora_policy(tied=tied))] == names


def test_of_two_adapters_the_active_one_counts() -> None:
    policy = lora_policy(tied=False, modules_to_save=["lm_head"])
    other = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy.add_adapter("other", other)
    policy.set_adapter("other")
    move(policy, 8)
    for name in ("other", "default"):
        policy.set_adapter(name)
        tensors = {tensor.name: tensor for tensor in policy_tensors(policy)}
        head: Any = policy.get_base_model().lm_head
        assert torch.equal(tensors["lm_head.weight"].current(name), head.modules_to_save[name].weight)
        adapted = sum(tensor.layer is not None for tensor in tensors.values())
        assert adapted == (2 if name == "other" else 14)


def layer_of(policy: PeftModel, name: str) -> Any:
    return policy.get_base_model().get_submodule(name)


def test_packed_factors_are_the_layers_own_times_their_scaling() -> None:
    policy = lora_policy(rank_pattern={"q_proj": 2, "up_proj": 8}, alpha_pattern={"v_proj": 2})
    factors = AdapterFactors(policy_tensors(policy), "default", torch.float32)
    first = factors.pack()
    for step in range(2):
        flat = factors.pack()
        assert flat.data_ptr() == first.data_ptr()
        for layer, (a, b) in zip(factors.layers, factor_views(flat, factors.layers), strict=True):
            own = layer_of(policy, layer.name)
            assert layer.rank == own.r["default"] == (2 if "q_proj" in layer.name else 8 if "up" in layer.name else 4)
            assert torch.equal(a, own.lora_A["default"].weight)
            torch.testing.assert_close(b, own.lora_B["default"].weight * own.scaling["default"])
        move(policy, step)
    assert len(factors.layers) == 14
    assert sum(layer.num_values for layer in factors.layers) == first.numel()
