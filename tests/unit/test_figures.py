"""Figures of an update that depend on whose log-probabilities the old ones are."""

from typing import Any

import pytest
import torch

from colocate_rl import GRPOConfig
from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.settings import loss_settings
from colocate_rl.training.figures import note_update
from colocate_rl.training.losses import LossInputs, grpo_loss

pytestmark = pytest.mark.unit


def logged(old: torch.Tensor, **changes: Any) -> dict[str, float | None]:
    """What an update logs whose policy is 0.3 nats from the engine, and 0.1 nats from where training began."""
    inputs = LossInputs(
        policy_logprobs=torch.full((2, 3), -1.0),
        old_logprobs=old,
        sampling_logprobs=torch.full((2, 3), -1.3),
        ref_logprobs=None,
        mask=torch.ones(2, 3, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0]),
    )
    settings = loss_settings(GRPOConfig("out", use_cpu=True, report_to="none", **changes))
    metrics = MetricBuffer()
    note_update(metrics, settings, inputs, grpo_loss(inputs, settings, 6.0), torch.zeros(2, 3))
    return metrics.flush(Collectives(torch.device("cpu")))


def test_the_gap_to_the_engine_is_told_whoever_is_old() -> None:
    gap = "sampling/sampling_logp_difference/mean"
    weight = "sampling/importance_sampling_ratio/mean"
    begun = logged(torch.full((2, 3), -1.1))
    assert begun[gap] == pytest.approx(0.2)
    assert begun[weight] == pytest.approx(float(torch.tensor(3 * 0.2).exp()))  # of a sequence of three tokens
    stale = logged(torch.full((2, 3), -1.3), overlap="one_step")
    assert stale[gap] == pytest.approx(0.3)  # not 0, though old is the engine's
    assert weight not in stale  # the ratio itself is policy / engine
    assert stale["clip_ratio/high_mean"] == pytest.approx(0.5)  # exp(0.3) is beyond 1.2, of half the tokens A > 0


def test_a_filter_leaves_the_ratio_to_the_policy() -> None:
    """Behind top_p the engine's probabilities are larger than the policy's, all of them: a clip range of its own."""
    for filtered in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"generation_kwargs": {"min_tokens": 2}}):
        args = GRPOConfig("out", use_cpu=True, report_to="none", overlap="one_step", **filtered)  # type: ignore[arg-type]
        assert args.old_logprobs_source == "policy"


@pytest.mark.parametrize(
    ("overlap", "asked", "source"),
    [
        ("none", "auto", "policy"),
        ("stream", "auto", "policy"),
        ("one_step", "auto", "sampling"),
        ("one_step", "policy", "policy"),
        ("none", "sampling", "sampling"),
    ],
)
def test_who_is_old(overlap: str, asked: str, source: str) -> None:
    args = GRPOConfig("out", use_cpu=True, report_to="none", overlap=overlap, old_logprobs=asked)
    assert args.old_logprobs_source == source
    assert loss_settings(args).correction == (source == "policy")
