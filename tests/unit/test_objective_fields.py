"""Every setting of the objective, from the configuration to loss and gradient, against the reference in float64.

The table holds each setting's effect; a setting without an entry, or an entry without an effect, fails.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colocate_rl import GRPOConfig, settings
from colocate_rl.collectives import Collectives
from colocate_rl.metrics import MetricBuffer
from colocate_rl.options import option_fields
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.training.logprobs import TokenStatistics
from colocate_rl.training.objective import Objective
from tests.tiny import tiny_config
from tests.unit import reference
from tests.unit.test_losses import make_problem

pytestmark = pytest.mark.unit

MAX_LENGTH = 16
TOKENS_PER_SLICE = 11.5
BASE = {"epsilon": 0.2, "max_completion_length": MAX_LENGTH, "vllm_importance_sampling_mode": "token_truncate"}
BASE_RULES = reference.Rules(
    loss_type="dapo",
    level="token",
    epsilon=0.2,
    epsilon_high=0.2,
    correction_mode="token_truncate",
    max_completion_length=MAX_LENGTH,
    tokens_per_micro_batch=TOKENS_PER_SLICE,
)


@dataclasses.dataclass(frozen=True)
class Effect:
    """Settings, what the reference calls them, and the settings that they are compared with."""

    changes: dict[str, Any]
    rules: dict[str, Any]
    without: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changes that both sides have: those the setting needs to do anything."""
    without_rules: dict[str, Any] = dataclasses.field(default_factory=dict)


KL = {"beta": 0.1}
SAPO = ({"loss_type": "sapo"}, {"loss_type": "sapo"})
VESPO = ({"loss_type": "vespo"}, {"loss_type": "vespo"})
EFFECTS: dict[str, list[Effect]] = {
    "loss_type": [
        Effect({"loss_type": name}, {"loss_type": name})
        for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
    ],
    "max_completion_length": [
        Effect(
            {"max_completion_length": 9},
            {"max_completion_length": 9},
            {"loss_type": "dr_grpo"},
            {"loss_type": "dr_grpo"},
        )
    ],
    "importance_sampling_level": [Effect({"importance_sampling_level": "sequence"}, {"level": "sequence"})],
    "epsilon": [Effect({"epsilon": 0.05}, {"epsilon": 0.05, "epsilon_high": 0.05})],
    "epsilon_high": [
        Effect({"epsilon_high": 0.4}, {"epsilon_high": 0.4}),
        Effect({"epsilon_high": 1.3}, {"epsilon_high": 1.3}, {"loss_type": "cispo"}, {"loss_type": "cispo"}),
    ],
    "delta": [Effect({"delta": 1.4}, {"delta": 1.4})],
    "beta": [Effect(KL, KL)],
    "use_bias_correction_kl": [Effect({"use_bias_correction_kl": False}, {"bias_correction": False}, KL, KL)],
    "sapo_temperature_pos": [Effect({"sapo_temperature_pos": 0.5}, {"sapo": (0.5, 1.05)}, *SAPO)],
    "sapo_temperature_neg": [Effect({"sapo_temperature_neg": 2.0}, {"sapo": (1.0, 2.0)}, *SAPO)],
    "vespo_k_pos": [Effect({"vespo_k_pos": 1.0}, {"vespo_k": (1.0, 3.0)}, *VESPO)],
    "vespo_k_neg": [Effect({"vespo_k_neg": 1.0}, {"vespo_k": (2.0, 1.0)}, *VESPO)],
    "vespo_lambda_pos": [Effect({"vespo_lambda_pos": 1.0}, {"vespo_lambda": (1.0, 2.0)}, *VESPO)],
    "vespo_lambda_neg": [Effect({"vespo_lambda_neg": 1.0}, {"vespo_lambda": (3.0, 1.0)}, *VESPO)],
    "off_policy_mask_threshold": [
        Effect({"off_policy_mask_threshold": 0.05}, {"off_policy_threshold": 0.05}),
        Effect({"off_policy_mask_threshold": 0.05}, {"off_policy_threshold": 0.05}, KL, KL),
    ],
    "top_entropy_quantile": [
        Effect({"top_entropy_quantile": share}, {"top_share": share}) for share in (0.0, 0.25, 0.5)
    ]
    + [Effect({"top_entropy_quantile": 0.25}, {"top_share": 0.25}, {"loss_type": "bnpo"}, {"loss_type": "bnpo"})],
    "entropy_coef": [
        Effect({"entropy_coef": 0.3}, {"entropy_coef": 0.3}),
        Effect({"entropy_coef": 0.3}, {"entropy_coef": 0.3}, {"top_entropy_quantile": 0.25}, {"top_share": 0.25}),
        Effect({"entropy_coef": 0.3}, {"entropy_coef": 0.3}, {"loss_type": "luspo"}, {"loss_type": "luspo"}),
    ],
    "vllm_importance_sampling_correction": [
        Effect({"vllm_importance_sampling_correction": False}, {"correction_mode": None})
    ],
    "old_logprobs": [Effect({"old_logprobs": "sampling"}, {"correction_mode": None})],
    "vllm_importance_sampling_mode": [
        Effect(
            {"vllm_importance_sampling_mode": mode},
            {"correction_mode": mode},
            {"vllm_importance_sampling_clip_max": 1.25},
            {"clip_max": 1.25},
        )
        for mode in ("token_mask", "sequence_truncate", "sequence_mask")
    ],
    "vllm_importance_sampling_clip_max": [
        Effect({"vllm_importance_sampling_clip_max": 1.1}, {"clip_max": 1.1}),
        Effect(
            {"vllm_importance_sampling_clip_max": None},
            {"clip_max": None},
            {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.1},
            {"correction_mode": "sequence_mask", "clip_max": 1.1},
        ),
    ],
    "vllm_importance_sampling_clip_min": [Effect({"vllm_importance_sampling_clip_min": 0.9}, {"clip_min": 0.9})],
    "vllm_importance_sampling_cap": [Effect({"vllm_importance_sampling_cap": 1.1}, {"clip_max": 1.1})],
}
TESTED_ELSEWHERE = {
    "num_iterations": "test_trainer_positions.py",
    "scale_rewards": "test_advantages.py",
    "reward_weights": "test_advantages.py",
    "multi_objective_aggregation": "test_advantages.py",
    "mask_truncated_completions": "tests/ranks/test_collect.py",
    "sync_ref_model": "test_moving.py",
    "ref_model_mixup_alpha": "test_moving.py",
    "ref_model_sync_steps": "test_moving.py",
    "use_adaptive_entropy": "test_moving.py",
    "entropy_coef_min": "test_moving.py",
    "entropy_coef_max": "test_moving.py",
    "entropy_coef_delta": "test_moving.py",
    "entropy_target": "test_moving.py",
    "logprob_chunk_size": "test_logprobs.py",
    "padding_free": "test_packing.py",
    "compile_layers": "test_compiling.py",
    "max_tokens_per_micro_batch": "test_packing.py",
    "router_aux_loss_coef": "test_routers.py",
    "use_liger_loss": "test_objective_checks.py",
}
"""Settings under "Loss" that do not act on the loss of given log-probabilities, and where they are tried."""
CASES = [(name, number) for name, effects in EFFECTS.items() for number in range(len(effects))]


class GivenStatistics(Objective):
    """An objective whose policy says what it is told; rows are known by their first id."""

    def told(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> "GivenStatistics":
        TOLD[id(self)] = TokenStatistics(logprobs, entropy)
        return self

    def statistics(
        self, wrapper: nn.Module, policy: nn.Module, batch: RolloutBatch, *, with_router: bool = False
    ) -> TokenStatistics:
        told, rows = TOLD[id(self)], batch.input_ids[:, 0]
        width = batch.input_ids.shape[1]
        return TokenStatistics(told.logprobs[rows, :width], told.entropy[rows, :width])


TOLD: dict[int, TokenStatistics] = {}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Tensors that the objective makes have the precision of those it is told."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_objective(folder: Path, changes: dict[str, Any]) -> GivenStatistics:
    """The objective that the trainer would use with these settings."""
    args = GRPOConfig(str(folder), per_device_train_batch_size=8, **{**BASE, **changes})
    made = settings.objective(args, tiny_config(), contextlib.nullcontext, Collectives(torch.device("cpu")))
    return GivenStatistics(**{item.name: getattr(made, item.name) for item in dataclasses.fields(made)})


def make_batch(problem: reference.Problem, *, old: reference.Array) -> RolloutBatch:
    rows, width = problem.mask.shape
    mask = torch.tensor(problem.mask, dtype=torch.bool)
    ends = torch.tensor([max(np.flatnonzero(row), default=0) + 1 for row in problem.mask])
    ids = torch.arange(rows)[:, None].expand(rows, width).contiguous()
    return RolloutBatch(
        input_ids=ids,
        attention_mask=torch.arange(width)[None] < ends[:, None],
        completion_mask=mask,
        loss_mask=mask,
        sampling_logprobs=torch.tensor(problem.sampling),
        advantages=torch.tensor(problem.advantages),
        old_logprobs=torch.tensor(old),
        ref_logprobs=torch.tensor(problem.ref),
    )


@contextlib.contextmanager
def early() -> Iterator[Callable[[torch.Tensor], None]]:
    yield lambda loss: loss.backward(retain_graph=True)


def run(
    objective: GivenStatistics, problem: reference.Problem, old: reference.Array
) -> tuple[float, reference.Array, reference.Array]:
    """Loss, and gradients by log-probability and by entropy."""
    logprobs = torch.tensor(problem.policy).requires_grad_()
    entropy = torch.tensor(problem.entropy).requires_grad_()
    model = nn.Linear(1, 1)  # stands where a policy would
    batch = make_batch(problem, old=old)
    loss, _ = objective.told(logprobs, entropy).loss(model, model, batch, TOKENS_PER_SLICE, MetricBuffer(), early)
    loss.backward()
    assert logprobs.grad is not None
    by_entropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return loss.item(), logprobs.grad.numpy(), by_entropy.numpy()


def problems() -> list[reference.Problem]:
    """Different shapes; an empty row, a row of advantage 0, entropies that are equal."""
    made = [make_problem(seed=1), make_problem(seed=2, rows=3, width=5), make_problem(seed=4, rows=6, width=9)]
    for problem in made:
        problem.mask[-1] = 0
        problem.advantages[2] = 0
        ties = np.argwhere(problem.mask)
        for row, token in ties[::2]:
            problem.entropy[row, token] = 0.75
    return made


@pytest.mark.filterwarnings("ignore:vllm_importance_sampling_cap is TRL's old name:FutureWarning")
@pytest.mark.parametrize(("name", "number"), CASES)
def test_each_setting_has_its_effect(tmp_path: Path, name: str, number: int) -> None:
    """Value and gradient, in one pass and in several, with the setting and without; and the two differ."""
    effect = EFFECTS[name][number]
    changes = {**effect.without, **effect.changes}
    rules = dataclasses.replace(BASE_RULES, **{**effect.without_rules, **effect.rules})
    differs = False
    for problem in problems():
        old = problem.sampling if name == "old_logprobs" else problem.old
        known = dataclasses.replace(problem, old=old)
        expected = reference.loss(known, rules)

        def at_policy(policy: reference.Array, known: reference.Problem = known) -> float:
            return reference.loss(dataclasses.replace(known, policy=policy), rules, fixed=known)

        def at_entropy(entropy: reference.Array, known: reference.Problem = known) -> float:
            chosen = reference.selected(known, rules.top_share)  # a step of the entropy must not change the selection
            return -rules.entropy_coef * sum(entropy[place] for place in chosen) / max(len(chosen), 1)

        by_policy = reference.gradient(at_policy, problem.policy)
        by_entropy = reference.gradient(at_entropy, problem.entropy)
        for budget in ({}, {"max_tokens_per_micro_batch": 6}):
            objective = make_objective(tmp_path, {**changes, **budget})
            assert len(objective.micro_batches(make_batch(problem, old=old))) > 1 or not budget
            loss, found, found_by_entropy = run(objective, problem, old)
            assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
            np.testing.assert_allclose(found, by_policy, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(found_by_entropy, by_entropy, rtol=1e-5, atol=1e-8)
        before, *_ = run(make_objective(tmp_path, effect.without), problem, problem.old)
        differs = differs or before != pytest.approx(expected, rel=1e-3)
    assert differs, "a setting that changes nothing here proves nothing"


def test_the_table_knows_every_setting_of_the_objective() -> None:
    names = [item.name for item in option_fields()]
    loss_settings = set(names[names.index("beta") : names.index("log_completions")])
    assert set(EFFECTS) - {"max_completion_length"} | set(TESTED_ELSEWHERE) == loss_settings
    assert not set(EFFECTS) & set(TESTED_ELSEWHERE)
    for place in TESTED_ELSEWHERE.values():
        assert (Path(__file__).parents[2] / (place if "/" in place else f"tests/unit/{place}")).is_file(), place


def test_a_rank_without_rows_takes_part_in_the_selection(tmp_path: Path) -> None:
    """In evaluation ranks may have different numbers of rows, and the quantile is that of all of them."""
    objective = make_objective(tmp_path, {"top_entropy_quantile": 0.25, "entropy_coef": 0.1})
    assert objective.selection is not None
    asked: list[int] = []

    class Counting(Collectives):
        def gather_ragged(self, values: torch.Tensor) -> list[torch.Tensor]:
            asked.append(len(values))
            return super().gather_ragged(values)

    selection = dataclasses.replace(objective.selection, collectives=Counting(torch.device("cpu")))
    objective = dataclasses.replace(objective, selection=selection)
    problem = make_problem()
    nothing = make_batch(problem, old=problem.old).rows([])
    model = nn.Linear(1, 1)
    empty = torch.zeros(0, 0)
    loss, _ = objective.told(empty, empty).loss(model, model, nothing, 1.0, MetricBuffer())
    assert loss.item() == 0.0
    assert asked == [0]


@pytest.mark.parametrize("changes", [{"top_entropy_quantile": 0.25}, {"entropy_coef": 0.1}, {"loss_type": "vespo"}])
def test_a_slice_with_nothing_in_the_loss(tmp_path: Path, changes: dict[str, Any]) -> None:
    problem = make_problem()
    problem.mask[:] = 0
    loss, by_policy, by_entropy = run(make_objective(tmp_path, changes), problem, problem.old)
    assert loss == 0.0
    assert not by_policy.any()
    assert not by_entropy.any()
