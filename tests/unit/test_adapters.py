"""What is trained, what is refused before it is trained wrongly, and the reference that needs no second model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig

from colocate_rl import GRPOConfig
from colocate_rl.errors import ConfigError
from colocate_rl.senders import lora_slot
from colocate_rl.training.adapters import (
    add_adapter,
    add_reference,
    causal_lm,
    check_adapters,
    check_arguments,
    reference_weights,
)
from colocate_rl.training.loading import load_models
from colocate_rl.training.logprobs import Head
from colocate_rl.training.merging import policy_tensors
from tests.lora import LINEAR, lora_policy, move
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit

IDS = torch.arange(30)[None]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(str(folder), per_device_train_batch_size=2, num_generations=2, **changes)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "no reference for beta=0.1"),
    ],
)
def test_adapters_that_engines_could_not_follow(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments("model", lora(**changes), None, args=config(tmp_path, beta=0.1))


def test_arguments_of_the_wrong_kind(tmp_path: Path) -> None:
    args = config(tmp_path)
    check_arguments("model", lora(init_lora_weights="pissa"), None, args=args)  # without a reference it may
    with pytest.raises(TypeError, match="got dict"):
        check_arguments("model", {"r": 4}, None, args=args)
    with pytest.raises(ConfigError, match="IA3Config"):
        check_arguments("model", IA3Config(target_modules=["q_proj"], feedforward_modules=[]), None, args=args)
    with pytest.raises(ConfigError, match="has an adapter already"):
        check_arguments(lora_policy(), lora(), None, args=args)


def test_a_way_into_the_engines_for_an_adapter_that_nobody_trains(tmp_path: Path) -> None:
    for way in ("merged", "adapter"):
        args = config(tmp_path, lora_sync=way)
        with pytest.raises(ConfigError, match=f"lora_sync='{way}' .*the whole model is trained"):
            check_arguments(tiny_model(), None, None, args=args)
        check_arguments(tiny_model(), lora(), None, args=args)
        check_arguments(lora_policy(), None, None, args=args)
    check_arguments(tiny_model(), None, None, args=config(tmp_path))


def test_quantised_weights_without_what_they_need(tmp_path: Path) -> None:
    bits, args = BitsAndBytesConfig(load_in_8bit=True), config(tmp_path)
    with pytest.raises(TypeError, match="BitsAndBytesConfig"):
        check_arguments("model", lora(), {"load_in_4bit": True}, args=args)
    with pytest.raises(ConfigError, match="loaded already"):
        check_arguments(tiny_model(), lora(), bits, args=args)
    with pytest.raises(ConfigError, match="cannot be trained"):
        check_arguments("model", None, bits, args=args)
    with pytest.raises(ConfigError, match="need a GPU"):
        check_arguments("model", lora(), bits, args=args)
    twice = config(tmp_path, model_init_kwargs={"quantization_config": {"load_in_8bit": True}})
    with pytest.raises(ConfigError, match="given twice"):
        check_arguments("model", lora(), bits, args=twice)


def two_active(policy: PeftModel) -> PeftModel:
    policy.add_adapter("other", lora())
    policy.base_model.set_adapter(["default", "other"])
    return policy


def other_trained(policy: PeftModel) -> PeftModel:
    policy.add_adapter("other", lora())
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return policy


def frozen(policy: PeftModel) -> PeftModel:
    policy.requires_grad_(False)
    return policy


def merged(policy: PeftModel) -> PeftModel:
    policy.merge_adapter()
    return policy


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (two_active, "2 active adapters"),
        (other_trained, r"other.* is trainable, but adapter 'other' is not the active one"),
        (frozen, "is_trainable=True"),
        (merged, "unmerge_adapter"),
    ],
)
def test_a_wrong_set_up_is_refused_by_name(spoil: Any, message: str) -> None:
    policy = lora_policy()
    check_adapters(policy)
    with pytest.raises(ConfigError, match=message):
        check_adapters(spoil(policy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "adapter on lm_head"),
        ({"modules_to_save": ["lm_head"]}, "this model ties them"),
        ({"modules_to_save": ["embed_tokens"]}, "this model ties them"),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, "this model ties them"),
        ({"target_modules": ["embed_tokens"]}, "this model ties them"),
    ],
)
def test_a_tied_head_and_its_embedding_never_part(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_adapters(lora_policy(**changes))
    if "lm_head" not in changes.get("target_modules", ()):
        check_adapters(lora_policy(tied=False, **changes))


def test_a_head_that_stays_tied_to_its_embedding_may_be_trained() -> None:
    policy = lora_policy(modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    check_adapters(policy)
    names = [tensor.name for tensor in policy_tensors(policy)]
    assert "lm_head.weight" not in names
    assert names.count("model.embed_tokens.weight") == 1


def test_an_adapter_that_transformers_put_there_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.add_adapter(lora())
    with pytest.raises(ConfigError, match=r"PeftModel\.from_pretrained"):
        load_models(model, config(tmp_path))


def test_layers_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="no_such_layer"):
        add_adapter(tiny_model(), lora(target_modules=["no_such_layer"]))


def flags(policy: PeftModel) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["norm"]}, {"use_dora": True}])
def test_the_reference_of_a_new_adapter_is_the_base_model_bit_for_bit(changes: dict[str, Any]) -> None:
    policy = lora_policy(**changes)
    first = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
    first.requires_grad_(False)  # a user's choice, which switching must not undo
    before, trained = policy(IDS).logits, flags(policy)
    with reference_weights(policy):
        assert torch.equal(policy(IDS).logits, tiny_model()(IDS).logits)
    assert flags(policy) == trained
    assert torch.equal(policy(IDS).logits, before)
    with pytest.raises(KeyError), reference_weights(policy):
        raise KeyError
    assert flags(policy) == trained
    assert torch.equal(policy(IDS).logits, before)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_reference_of_a_trained_adapter_is_a_copy_of_it(name: str) -> None:
    policy = get_peft_model(tiny_model(), lora(modules_to_save=["norm"]), adapter_name=name)
    move(policy, 1)
    before, trained = policy(IDS).logits, {n for n, on in flags(policy).items() if on}
    add_reference(policy)
    check_adapters(policy)
    assert {n for n, on in flags(policy).items() if on} == trained
    assert torch.equal(policy(IDS).logits, before)
    move(policy, 2)
    moved = policy(IDS).logits
    assert not torch.allclose(moved, before, atol=1e-2)
    with reference_weights(policy):
        assert torch.equal(policy(IDS).logits, before)
    assert torch.equal(policy(IDS).logits, moved)
    with pytest.raises(ConfigError, match="named 'ref'"):
        add_reference(policy)


def test_the_head_is_the_active_trained_copy() -> None:
    policy = lora_policy(tied=False, modules_to_save=["lm_head"])
    wrapper: Any = policy.get_base_model().lm_head
    assert Head.of(causal_lm(policy)).weight is wrapper.modules_to_save["default"].weight
    with reference_weights(policy):
        assert Head.of(causal_lm(policy)).weight is wrapper.original_module.weight


def test_the_way_into_the_engine_is_decided_by_what_the_adapter_is(tmp_path: Path) -> None:
    auto, merged_way, slot = (config(tmp_path, lora_sync=way) for way in ("auto", "merged", "adapter"))
    ranked = lora_policy(rank_pattern={"q_proj": 12})
    found = lora_slot(slot, ranked, "float32")
    assert found is not None
    assert found.max_rank == 12
    assert sorted(found.target_modules) == sorted(LINEAR)
    for way in (auto, merged_way):
        assert lora_slot(way, ranked, "float32") is None
    assert lora_slot(slot, tiny_model(), "float32") is None
    for changes, reason in (
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed_tokens"]}, "is an embedding"),
        ({"r": 513}, "rank 513"),
    ):
        policy = lora_policy(tied=False, **changes)
        with pytest.raises(ConfigError, match=reason):
            lora_slot(slot, policy, "float32")
