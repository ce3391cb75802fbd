"""Settings of the objective that cannot work, that hardly do what is meant, and TRL's older names."""

import logging
from pathlib import Path
from typing import Any

import pytest

from colocate_rl import GRPOConfig, config
from colocate_rl.errors import ConfigError

pytestmark = pytest.mark.unit


def make(folder: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(str(folder), per_device_train_batch_size=8, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": -0.1}, ["epsilon is -0.1", "at least 0"]),
        ({"epsilon_high": -0.1}, ["epsilon_high is -0.1"]),
        ({"delta": 1.0}, ["delta is 1.0", "above 1"]),
        ({"sapo_temperature_pos": 0.0}, ["sapo_temperature_pos is 0.0"]),
        ({"sapo_temperature_neg": -1.0}, ["sapo_temperature_neg is -1.0"]),
        ({"vespo_k_pos": -1.0}, ["vespo_k_pos is -1.0"]),
        ({"vespo_k_neg": -1.0}, ["vespo_k_neg is -1.0"]),
        ({"vespo_lambda_pos": 0.0}, ["vespo_lambda_pos is 0.0"]),
        ({"vespo_lambda_neg": 0.0}, ["vespo_lambda_neg is 0.0"]),
        ({"ref_model_mixup_alpha": 0.0}, ["ref_model_mixup_alpha is 0.0", "the policy's share"]),
        ({"ref_model_mixup_alpha": 1.5}, ["ref_model_mixup_alpha is 1.5"]),
        ({"ref_model_sync_steps": 0}, ["ref_model_sync_steps is 0", "optimizer step"]),
        ({"top_entropy_quantile": 1.2}, ["top_entropy_quantile is 1.2", "0 to 1"]),
        ({"top_entropy_quantile": -0.1}, ["top_entropy_quantile is -0.1"]),
        ({"router_aux_loss_coef": -0.1}, ["router_aux_loss_coef is -0.1"]),
        ({"entropy_coef_delta": -0.1}, ["entropy_coef_delta is -0.1"]),
        ({"off_policy_mask_threshold": 0.0}, ["off_policy_mask_threshold is 0.0", "nats per token"]),
        ({"entropy_coef": float("nan")}, ["entropy_coef=nan", "finite"]),
        ({"beta": float("inf")}, ["beta=inf", "finite"]),
        ({"reward_weights": [1.0, float("nan")]}, ["reward_weights=[1.0, nan]", "finite"]),
        ({"sync_ref_model": True}, ["sync_ref_model=True", "beta=0.0", "no reference model"]),
        (
            {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_coef_max": 0.1},
            ["entropy_coef=0.5", "entropy_coef_min=0.0", "entropy_coef_max=0.1"],
        ),
        (
            {"use_adaptive_entropy": True, "entropy_coef_min": 0.2, "entropy_coef": 0.2, "entropy_coef_max": 0.1},
            ["entropy_coef_min=0.2"],
        ),
        ({"loss_type": "vespo"}, ["loss_type='vespo'", "'sequence_mask'", "token_truncate"]),
        (
            {"vllm_importance_sampling_clip_min": 3.0},
            ["vllm_importance_sampling_clip_min=3.0", "below", "clip_max=3.0"],
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            ["'token_truncate'", "both are None"],
        ),
    ],
)
def test_refusals_name_the_setting_and_the_numbers(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
        {"loss_type": "vespo", "vllm_importance_sampling_correction": False},
        {"loss_type": "vespo", "old_logprobs": "sampling"},
        {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 1.0},
        {"use_adaptive_entropy": True},
        {"top_entropy_quantile": 0.0},
        {
            "vllm_importance_sampling_correction": False,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
    ],
)
def test_what_can_work_is_taken_without_a_word(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        make(tmp_path, **changes)
    assert not caplog.records


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_levels_that_contradict_the_loss_are_warned_of(
    tmp_path: Path, loss_type: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    fits = {
        "token": {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"},
        "sequence": {"grpo", "sapo", "luspo"},
    }
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        make(
            tmp_path,
            loss_type=loss_type,
            importance_sampling_level=level,
            vllm_importance_sampling_mode="token_truncate",
        )
    assert [loss_type in record.getMessage() for record in caplog.records] == [True] * (loss_type not in fits[level])


# Older names, and Liger


def test_the_old_name_of_the_upper_bound(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        args = make(tmp_path, vllm_importance_sampling_cap=2.0)
    assert args.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize("value", [True, False])
def test_liger_s_loss_is_not_needed_and_says_so(tmp_path: Path, value: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "colocate_rl"):
        make(tmp_path)
        assert not caplog.records
        make(tmp_path, use_liger_loss=value)
    assert f"use_liger_loss={value} changes nothing" in caplog.text
    assert "logprob_chunk_size=1024" in caplog.text


def test_liger_s_kernels_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "is_liger_kernel_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel"):
        make(tmp_path, use_liger_kernel=True)


def test_liger_s_kernels_leave_the_head_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "is_liger_kernel_available", lambda: True)
    args = make(tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert args.liger_kernel_config == {"rope": False, "fused_linear_cross_entropy": False}
    with pytest.raises(ConfigError, match="fused_linear_cross_entropy"):
        make(tmp_path, use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True})
