"""A policy that computes what engines compute, where transformers' default would not."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from colocate_rl import GRPOConfig
from colocate_rl.training.loading import load_models
from colocate_rl.training.policy import make_reference
from tests.tiny import tiny_model

pytestmark = pytest.mark.unit


def capped(**changes: float | None) -> PreTrainedModel:
    """Attention scores far beyond the cap."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(100)
    return model


def test_attention_scores_are_capped_in_policy_and_reference(tmp_path: Path) -> None:
    """vLLM caps them; torch's attention function, transformers' default, leaves that out without a word."""
    capped().save_pretrained(tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    without = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    policy, reference = load_models(str(tmp_path), GRPOConfig(str(tmp_path / "out"), use_cpu=True, beta=0.1))
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        wanted = exact(ids).logits
        assert not torch.allclose(without(ids).logits, wanted, atol=1e-2), "the cap does nothing here"
        for model in (policy, reference, make_reference(policy, None, {}, trust_remote_code=False)):
            assert model is not None
            torch.testing.assert_close(model(ids).logits, wanted)


def test_what_the_user_chose_stays_and_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capped().save_pretrained(tmp_path)
    args = GRPOConfig(str(tmp_path / "out"), use_cpu=True, model_init_kwargs={"attn_implementation": "sdpa"})
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        for model in (tiny_model(), capped(attn_logit_softcapping=None)):
            load_models(model, args)
        assert not caplog.records
        policy, _ = load_models(str(tmp_path), args)
        assert policy.config._attn_implementation == "sdpa"
        load_models(capped(), args)
    assert [record.message for record in caplog.records if "attn_logit_softcapping" in record.message] != []
    assert len(caplog.records) == 2
