"""What of the objective moves while a run trains: by hand, in a run, and over a resume."""

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import TrainerCallback

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.collectives import Collectives
from colocate_rl.errors import ConfigError, DataError
from colocate_rl.metrics import MetricBuffer
from colocate_rl.training import adapters
from colocate_rl.training.moving import EntropyBonus, MovingParts, MovingReference
from tests.lora import lora_policy
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.unit, pytest.mark.timeout(240)]

ALONE = Collectives(torch.device("cpu"))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# The reference by hand


def test_the_reference_takes_its_share_every_so_many_steps() -> None:
    policy, reference = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    reference.requires_grad_(False)
    nn.init.constant_(policy.weight, 10.0)
    nn.init.constant_(reference.weight, 0.0)
    moving = MovingReference(reference, mixup=0.6, every=2)
    seen = []
    for step in (1, 2, 3, 4):
        moving.follow(policy, step)
        seen.append(round(reference.weight[0, 0].item(), 4))
    assert seen == [0.0, 6.0, 6.0, 8.4]
    assert policy.weight[0, 0].item() == 10.0


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_survives_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    saved, other = tiny_model(seed=1, tied=tied), tiny_model(seed=2, tied=tied)
    MovingReference(saved, 0.5, 1).save(tmp_path)
    MovingReference(other, 0.5, 1).load(tmp_path)
    for name, weight in weights_of(saved).items():
        assert torch.equal(weights_of(other)[name], weight), name
    assert (other.get_output_embeddings().weight is other.get_input_embeddings().weight) == tied


# The entropy bonus by hand


def trajectory(bonus: EntropyBonus, entropies: list[float]) -> list[tuple[float, float]]:
    """(applied, coefficient afterwards) of steps with these mean entropies."""
    found = []
    for entropy in entropies:
        applied = round(bonus.applied, 6)
        bonus.observe(torch.full((1, 2), entropy), torch.tensor([[True, False]]))
        bonus.end_step(ALONE)
        found.append((applied, round(bonus.coefficient, 6)))
    return found


def test_adaptive_weight_by_hand() -> None:
    """Up while entropy is at or below the target, down else; applied only after a step at or below it."""
    bonus = EntropyBonus(0.1, target=1.0, delta=0.05, bounds=(0.05, 0.2))
    assert trajectory(bonus, [2.0, 1.0, 0.5, 0.5, 3.0, 3.0, 3.0, 3.0]) == [
        (0.0, 0.05),
        (0.0, 0.1),
        (0.1, 0.15),
        (0.15, 0.2),
        (0.2, 0.15),
        (0.0, 0.1),
        (0.0, 0.05),
        (0.0, 0.05),
    ]


def test_a_step_that_did_not_end_counts_for_nothing() -> None:
    bonus = EntropyBonus(0.1, target=1.0, delta=0.05)
    bonus.observe(torch.full((1, 2), 5.0), torch.ones(1, 2, dtype=torch.bool))  # interrupted: far above the target
    MovingParts(ALONE, bonus=bonus).forget()
    assert trajectory(bonus, [0.5, 0.5]) == [(0.0, 0.15), (0.15, 0.2)]


def test_a_step_s_entropy_is_that_of_all_its_chosen_tokens() -> None:
    """Three tokens of 1 nat and one of 5: 2 nats, though the micro-batches' means are 1 and 5."""
    bonus = EntropyBonus(0.1, target=2.0, delta=0.05)
    bonus.observe(torch.ones(1, 4), torch.tensor([[True, True, True, False]]))
    bonus.observe(torch.full((1, 1), 5.0), torch.tensor([[True]]))
    bonus.end_step(ALONE)
    assert bonus.coefficient == pytest.approx(0.15)
    higher = EntropyBonus(0.1, target=1.99, delta=0.05)
    higher.observe(torch.ones(1, 4), torch.tensor([[True, True, True, False]]))
    higher.observe(torch.full((1, 1), 5.0), torch.tensor([[True]]))
    higher.end_step(ALONE)
    assert higher.coefficient == pytest.approx(0.05)


def test_a_fixed_weight_is_always_applied_and_never_saved(tmp_path: Path) -> None:
    bonus = EntropyBonus(0.3)
    assert trajectory(bonus, [0.0, 9.0]) == [(0.3, 0.3), (0.3, 0.3)]
    parts = MovingParts(ALONE, bonus=bonus)
    parts.save(tmp_path)
    assert not list(tmp_path.iterdir())
    parts.load(tmp_path)
    metrics = MetricBuffer()
    parts.end_step(nn.Linear(1, 1), 1, metrics)
    assert metrics.flush(ALONE) == {"entropy_coef": pytest.approx(0.3)}


@pytest.mark.parametrize("entropies", [[], [0.5, 0.5]])
def test_an_adaptive_weight_survives_a_checkpoint(tmp_path: Path, entropies: list[float]) -> None:
    first, second = (EntropyBonus(0.1, target=1.0, delta=0.05) for _ in range(2))
    trajectory(first, entropies)
    MovingParts(ALONE, bonus=first).save(tmp_path)
    MovingParts(ALONE, bonus=second).load(tmp_path)
    assert trajectory(second, [0.5, 3.0]) == trajectory(first, [0.5, 3.0])


def test_a_checkpoint_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no reference.safetensors: .* without sync_ref_model=True"):
        MovingParts(ALONE, MovingReference(nn.Linear(1, 1), 0.5, 1)).load(tmp_path)
    with pytest.raises(DataError, match=r"no entropy_ctrl_state.json: .* without use_adaptive_entropy=True"):
        MovingParts(ALONE, bonus=EntropyBonus(0.1, target=1.0)).load(tmp_path)


def test_adapters_leave_no_reference_that_could_follow(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, beta=0.1, sync_ref_model=True)
    with pytest.raises(ConfigError, match="needs a reference model of its own"):
        adapters.check_arguments("model", LoraConfig(), None, args=args)
    with pytest.raises(ConfigError, match="needs a reference model of its own"):
        adapters.check_arguments(lora_policy(), None, None, args=args)
    adapters.check_arguments("model", None, None, args=args)


# In a run


class Watcher(TrainerCallback):
    """Keeps the policy's weights after each step."""

    def __init__(self) -> None:
        self.policies: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.policies.append(weights_of(model))


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())


def make(folder: Path, **changes: Any) -> GRPOTrainer:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 32,
        "learning_rate": 0.3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_steps": 5,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "vllm_logprob_gap_limit": 0,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    prompts = datasets.Dataset.from_dict({"prompt": [f"{number}=" for number in range(9)]})
    return GRPOTrainer(
        tiny_model(),
        even_ids,
        GRPOConfig(str(folder), **{**values, **changes}),
        prompts,
        processing_class=tiny_tokenizer(),
    )


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "step_time" in record]


def test_a_run_s_reference_follows_its_policy_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    chosen = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
    trainer, watcher = make(tmp_path, **chosen), Watcher()
    trainer.add_callback(watcher)
    expected = weights_of(tiny_model())
    trainer.train()
    for step, policy in enumerate(watcher.policies, start=1):
        if step % 2 == 0:
            expected = {name: 0.6 * policy[name] + 0.4 * weight for name, weight in expected.items()}
    assert trainer.ref_model is not None
    moved = max(float((weight - weights_of(tiny_model())[name]).abs().max()) for name, weight in expected.items())
    assert moved > 1e-3
    for name, weight in weights_of(trainer.ref_model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    log = records(tmp_path)
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert log[1]["kl"] > 0

    resumed = make(tmp_path, **chosen)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.ref_model is not None
    for name, weight in weights_of(resumed.ref_model).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    for again, first in zip(records(tmp_path)[5:], log[3:], strict=True):
        for figure in ("kl", "loss", "grad_norm"):
            assert again[figure] == pytest.approx(first[figure], rel=1e-3, abs=1e-6), figure

    plain = make(tmp_path / "plain", beta=0.1, max_steps=1)
    plain.train()
    late = make(tmp_path / "plain", **chosen)
    with pytest.raises(DataError, match=r"checkpoint-1.*no reference.safetensors"):
        late.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))


def test_a_fixed_reference_is_not_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path, beta=0.1, max_steps=1)
    trainer.train()
    assert not list(tmp_path.rglob("reference.safetensors"))
    assert trainer.ref_model is not None
    for name, weight in weights_of(trainer.ref_model).items():
        assert torch.equal(weight, weights_of(tiny_model())[name])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_s_entropy_bonus_adapts_and_goes_on_after_a_resume(tmp_path: Path, accumulation: int) -> None:
    """The trajectory is computed a second time from the logged entropies."""
    probe = make(tmp_path / "probe", save_strategy="no", gradient_accumulation_steps=accumulation)
    probe.train()
    low, high = sorted(record["entropy"] for record in records(tmp_path / "probe"))[1:3]
    chosen = {
        "gradient_accumulation_steps": accumulation,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_coef_delta": 0.04,
        "entropy_coef_max": 0.15,
        "entropy_target": (low + high) / 2,
    }
    trainer = make(tmp_path, **chosen)
    trainer.train()
    log = records(tmp_path)
    coefficient, last, applied = 0.1, math.inf, []
    for record in log:
        applied.append(coefficient if last <= chosen["entropy_target"] else 0.0)
        last = record["entropy"]
        change = 0.04 if last <= chosen["entropy_target"] else -0.04
        coefficient = min(max(coefficient + change, 0.0), 0.15)
        assert record["entropy_coef"] == pytest.approx(coefficient)
    assert applied[0] == 0.0
    assert any(applied), "a bonus that is never applied proves nothing"
    for weight, record in zip(applied, log, strict=True):
        bonus = record["policy_loss"] - record["loss"]
        if accumulation == 1:  # one slice: its mean entropy is the logged one
            assert bonus == pytest.approx(weight * record["entropy"], abs=1e-4)
        assert (abs(bonus) > 1e-3) == (weight > 0)
    resumed = make(tmp_path, **chosen)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for again, first in zip(records(tmp_path)[5:], log[3:], strict=True):
        for figure in ("entropy_coef", "policy_loss", "loss", "entropy"):
            assert again[figure] == pytest.approx(first[figure], rel=1e-3, abs=1e-6), figure


def test_the_bonus_raises_the_entropy(tmp_path: Path) -> None:
    """The whole way through the policy: more entropy after a step with the bonus than after one without."""
    found = {}
    for coefficient in (0.0, 5.0, -5.0):
        chosen = {"entropy_coef": coefficient, "max_steps": 2, "save_strategy": "no", "learning_rate": 0.01}
        trainer = make(tmp_path / str(coefficient), **chosen)
        trainer.train()
        batch = torch.randint(256, (4, 12), generator=torch.Generator().manual_seed(1))
        logits = trainer.model(input_ids=batch).logits.detach()
        found[coefficient] = float(torch.distributions.Categorical(logits=logits).entropy().mean())
    assert found[-5.0] < found[0.0] < found[5.0]
