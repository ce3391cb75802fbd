"""Losses against an independent implementation in float64, gradients against finite differences, and the edges."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from colocate_rl.training.aggregation import AGGREGATIONS
from colocate_rl.training.losses import LossInputs, LossOutput, LossSettings, grpo_loss
from colocate_rl.training.ratios import kl_k3, log_ratio, off_policy_mask, sampling_correction
from colocate_rl.training.surrogates import Gamma, clipped_surrogate
from tests.unit import reference

pytestmark = pytest.mark.unit

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")
MODES = (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES = [
    (loss_type, level, mode)
    for loss_type, level, mode in itertools.product(LOSS_TYPES, LEVELS, MODES)
    if not (loss_type == "vespo" and mode is not None and mode.startswith("sequence"))  # refused by the configuration
]
BOUNDS = ((3.0, None), (1.25, 0.8), (None, 0.9))
KL = ((0.0, True), (0.1, True), (0.1, False))
DELTAS = (None, 1.5)
MAX_LENGTH = 16
TOKENS_PER_MICRO_BATCH = 13.5


def make_problem(seed: int = 0, rows: int = 5, width: int = 7) -> reference.Problem:
    """Rows of different lengths whose ratios fall below, inside and above every bound that the tests use."""
    random = np.random.default_rng(seed)
    old = -random.exponential(1.5, (rows, width))
    mask = np.zeros((rows, width))
    for row in range(rows):
        start = int(random.integers(1, 3))
        mask[row, start : start + 1 + row % (width - 3)] = 1
    advantages = random.normal(size=rows)
    advantages[:2] = 1.3, -0.7
    return reference.Problem(
        policy=(old + random.normal(0.0, 0.5, old.shape)) * mask,
        old=old * mask,
        sampling=(old + random.normal(0.0, 0.3, old.shape)) * mask,
        ref=(old + random.normal(0.0, 0.4, old.shape)) * mask,
        mask=mask,
        advantages=advantages,
        entropy=random.exponential(1.0, old.shape) * mask,
    )


def make_inputs(problem: reference.Problem, dtype: torch.dtype = torch.float64) -> LossInputs:
    """The same micro-batch as tensors; only the policy's log-probabilities need a gradient."""

    def tensor(values: reference.Array) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return LossInputs(
        policy_logprobs=tensor(problem.policy).requires_grad_(),
        old_logprobs=tensor(problem.old),
        sampling_logprobs=tensor(problem.sampling),
        ref_logprobs=tensor(problem.ref),
        mask=torch.tensor(problem.mask, dtype=torch.bool),
        advantages=tensor(problem.advantages),
    )


def rounded(problem: reference.Problem) -> reference.Problem:
    """The problem with every number rounded to float32, so that only the computation itself differs."""
    return reference.Problem(
        **{
            item.name: getattr(problem, item.name).astype(np.float32).astype(np.float64)
            for item in dataclasses.fields(problem)
        }
    )


def settings_of(rules: reference.Rules) -> LossSettings:
    """The package's settings that say what ``rules`` say."""
    return LossSettings(
        loss_type=rules.loss_type,
        importance_sampling_level=rules.level,
        epsilon=rules.epsilon,
        epsilon_high=rules.epsilon_high,
        delta=rules.delta,
        beta=rules.beta,
        use_bias_correction_kl=rules.bias_correction,
        max_completion_length=rules.max_completion_length,
        correction=rules.correction_mode is not None,
        correction_mode=rules.correction_mode or "sequence_mask",
        correction_clip_max=rules.clip_max,
        correction_clip_min=rules.clip_min,
        off_policy_threshold=rules.off_policy_threshold,
        sapo_temperature_pos=rules.sapo[0],
        sapo_temperature_neg=rules.sapo[1],
        vespo_positive=Gamma(rules.vespo_k[0], rules.vespo_lambda[0]),
        vespo_negative=Gamma(rules.vespo_k[1], rules.vespo_lambda[1]),
    )


def make_rules(loss_type: str, level: str, **changes: object) -> reference.Rules:
    values: dict[str, object] = {
        "loss_type": loss_type,
        "level": level,
        "epsilon": 0.2,
        "epsilon_high": 1.2 if loss_type == "cispo" else 0.28,  # there it is the cap itself
        "max_completion_length": MAX_LENGTH,
        "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH,
    }
    return reference.Rules(**{**values, **changes})  # type: ignore[arg-type]


def computed(inputs: LossInputs, rules: reference.Rules) -> LossOutput:
    return grpo_loss(inputs, settings_of(rules), rules.tokens_per_micro_batch)


# Values


@pytest.mark.parametrize(("loss_type", "level", "mode"), CASES)
def test_loss_equals_the_reference(loss_type: str, level: str, mode: str | None) -> None:
    for seed, (beta, bias), delta, (high, low) in itertools.product((0, 1), KL, DELTAS, BOUNDS):
        rules = make_rules(
            loss_type,
            level,
            correction_mode=mode,
            beta=beta,
            bias_correction=bias,
            delta=delta,
            clip_max=high,
            clip_min=low,
        )
        problem = make_problem(seed)
        exact = computed(make_inputs(problem), rules).loss
        assert exact.dtype == torch.float64
        assert exact.item() == pytest.approx(reference.loss(problem, rules), rel=1e-12), rules
        single = computed(make_inputs(problem, torch.float32), rules).loss
        assert single.dtype == torch.float32
        expected = reference.loss(rounded(problem), rules)
        assert single.item() == pytest.approx(expected, rel=1e-6, abs=5e-7), rules


def test_the_problem_reaches_every_branch() -> None:
    """A comparison would say little if no ratio were ever clipped or no weight ever masked."""
    for level in LEVELS:
        ratios = [
            reference.ratio(make_problem(seed), row, token, level)
            for seed in (0, 1)
            for row, token in np.argwhere(make_problem(seed).mask).tolist()
        ]
        assert min(ratios) < 0.8
        assert max(ratios) > 1.28
    for mode, (high, low) in itertools.product(MODES[1:], BOUNDS[1:]):
        problem = make_problem(0)
        rules = make_rules("grpo", "token", correction_mode=mode, clip_max=high, clip_min=low)
        weights = {
            round(reference.correction(problem, row, token, rules), 9)
            for row, token in np.argwhere(problem.mask).tolist()
        }
        assert len(weights) > 1, (mode, weights)
        assert weights & ({0.0} if "mask" in str(mode) else {high, low}), (mode, weights)
    over = [
        reference.ratio(make_problem(seed), row, token, "token") > 1.5 and make_problem(seed).advantages[row] < 0
        for seed in (0, 1)
        for row, token in np.argwhere(make_problem(seed).mask).tolist()
    ]
    assert any(over), "delta only shows where a large ratio meets a negative advantage"


@pytest.mark.parametrize(("loss_type", "level", "mode"), CASES)
def test_gradient_equals_finite_differences(loss_type: str, level: str, mode: str | None) -> None:
    problem = make_problem(seed=3, rows=4, width=6)
    for (beta, bias), delta in itertools.product(KL, DELTAS):
        rules = make_rules(
            loss_type,
            level,
            correction_mode=mode,
            clip_max=1.25,
            clip_min=0.8,
            beta=beta,
            bias_correction=bias,
            delta=delta,
        )

        def loss_at(policy: reference.Array, rules: reference.Rules = rules) -> float:
            return reference.loss(dataclasses.replace(problem, policy=policy), rules, fixed=problem)

        inputs = make_inputs(problem)
        computed(inputs, rules).loss.backward()
        found = inputs.policy_logprobs.grad
        assert found is not None
        expected = reference.gradient(loss_at, problem.policy)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)
        assert np.abs(expected).max() > 1e-3, "a zero gradient would prove nothing"


def test_loss_type_table_is_complete() -> None:
    assert tuple(AGGREGATIONS) == LOSS_TYPES


# Hand-computed numbers


def test_four_averages_by_hand() -> None:
    """Token losses 1 and 2 in a row of two, 6 in a row of one."""
    inputs = LossInputs(
        policy_logprobs=torch.zeros(2, 3),
        old_logprobs=torch.zeros(2, 3),
        sampling_logprobs=torch.tensor([[0.0, 0.0, -math.log(2.0)], [0.0, 0.0, 0.0]]),
        ref_logprobs=None,
        mask=torch.tensor([[False, True, True], [False, True, False]]),
        advantages=torch.tensor([-1.0, -6.0]),
    )
    expected = {"grpo": (1.5 + 6) / 2, "bnpo": 9 / 3, "dr_grpo": 9 / (2 * 10), "dapo": 9 / 4.5}
    for loss_type, value in expected.items():
        settings = LossSettings(loss_type=loss_type, max_completion_length=10, correction_mode="token_truncate")
        assert grpo_loss(inputs, settings, 4.5).loss.item() == pytest.approx(value), loss_type


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "expected"),
    [
        (1.0, 2.0, None, -2.0),
        (1.5, 2.0, None, -2.0 * 1.28),  # clipped above
        (1.5, -2.0, None, 3.0),  # a rise of a bad token is not clipped ...
        (1.5, -2.0, 1.4, 2.8),  # ... but by delta
        (0.5, 2.0, None, -1.0),
        (0.5, -2.0, None, 2.0 * 0.8),  # clipped below
        (1.5, 2.0, 1.4, -2.0 * 1.28),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, delta: float | None, expected: float) -> None:
    loss = clipped_surrogate(
        torch.tensor([[ratio]]),
        torch.tensor([advantage]),
        epsilon=0.2,
        epsilon_high=0.28,
        delta=delta,
    )
    assert loss.item() == pytest.approx(expected)


def test_log_ratio_levels_by_hand() -> None:
    new = torch.tensor([[9.0, 1.0, 2.0, 7.0]])
    old = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    mask = torch.tensor([[False, True, True, False]])
    assert log_ratio(new, old, mask, "token").tolist() == [[0.0, 0.5, 1.5, 0.0]]
    assert log_ratio(new, old, mask, "sequence").tolist() == [[1.0]]


def test_kl_is_zero_at_equality_never_negative_and_zero_outside_the_mask() -> None:
    policy, ref = torch.randn(3, 4), torch.randn(3, 4)
    mask = torch.tensor([[True, True, False, False]] * 3)
    assert kl_k3(policy, policy, mask).abs().max() == 0
    kl = kl_k3(policy, ref, mask)
    assert bool((kl >= 0).all())
    assert kl[:, 2:].abs().max() == 0
    one = kl_k3(torch.tensor([[0.0]]), torch.tensor([[math.log(3.0)]]), torch.tensor([[True]]))
    assert one.item() == pytest.approx(2.0 - math.log(3.0))


def test_sampling_correction_by_hand() -> None:
    """Ratios 2 and 4 in the first row (8 together), 1/2 in the second; the third column is padding."""
    old = torch.tensor([[math.log(2.0), math.log(4.0), 5.0], [-math.log(2.0), 0.0, 5.0]])
    sampling = torch.zeros(2, 3)
    mask = torch.tensor([[True, True, False], [True, False, False]])

    def weights(mode: str, high: float | None, low: float | None) -> list[list[float]]:
        found = sampling_correction(old, sampling, mask, mode=mode, clip_max=high, clip_min=low)
        return [[round(value, 5) for value in row] for row in found.tolist()]

    assert weights("token_truncate", 3.0, None) == [[2.0, 3.0, 1.0], [0.5, 1.0, 1.0]]
    assert weights("token_mask", 3.0, 0.75) == [[2.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert weights("sequence_truncate", 3.0, 0.75) == [[3.0], [0.75]]
    assert weights("sequence_mask", 3.0, None) == [[0.0], [0.5]]
    assert weights("sequence_mask", None, 0.75) == [[8.0], [0.0]]


def test_sampling_correction_treats_nan_as_no_difference_and_has_no_gradient() -> None:
    old = torch.tensor([[0.5, 0.25]], requires_grad=True)
    sampling = torch.tensor([[math.nan, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = sampling_correction(old, sampling, mask, mode="token_truncate", clip_max=3.0, clip_min=None)
    assert found.tolist() == [[1.0, pytest.approx(math.exp(0.25))]]
    assert not found.requires_grad


def test_correction_scales_the_surrogate_and_not_the_kl() -> None:
    """A row whose weight is masked to 0 keeps its KL term."""
    problem = make_problem()
    far = dataclasses.replace(problem, sampling=problem.old - 5.0 * problem.mask)
    inputs = make_inputs(far)
    rules = make_rules("bnpo", "token", correction_mode="sequence_mask", beta=0.1)
    only_kl = dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    assert computed(inputs, rules).loss.item() == pytest.approx(computed(only_kl, rules).loss.item())
    assert computed(inputs, rules).loss.item() > 0


# On policy


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_reinforce(loss_type: str, level: str) -> None:
    """With old = live every ratio is 1 and the gradient is that of the averaged -A log p."""
    problem = make_problem(seed=5)
    inputs = make_inputs(problem, torch.float32)
    inputs = dataclasses.replace(inputs, old_logprobs=inputs.policy_logprobs.detach())
    rules = make_rules(loss_type, level)  # no cap, gate or weight is anything but 1 where the ratio is
    output = computed(inputs, rules)
    assert bool((output.ratio == 1.0).all())
    (found,) = torch.autograd.grad(output.loss, inputs.policy_logprobs)

    mask = inputs.mask.double()
    logprobs = inputs.policy_logprobs.detach().double().requires_grad_()
    objective = -inputs.advantages.double()[:, None] * logprobs * mask
    averaged = {
        "grpo": (objective.sum(1) / mask.sum(1).clamp(min=1)).mean(),
        "bnpo": objective.sum() / mask.sum(),
        "dr_grpo": objective.sum() / (mask.shape[0] * MAX_LENGTH),
        "dapo": objective.sum() / TOKENS_PER_MICRO_BATCH,
        "luspo": objective.sum(1).mean(),
    }[{"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(loss_type, loss_type)]
    (expected,) = torch.autograd.grad(averaged, logprobs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-8)


# Edges (F6): rows without tokens, rows left out, a batch with nothing to learn from


def edge_masks() -> dict[str, torch.Tensor]:
    full = torch.tensor([[False, True, True, True], [False, True, True, False], [False, True, False, False]])
    empty_row, one_masked = full.clone(), full.clone()
    empty_row[2] = False
    one_masked[0] = False
    return {
        "full": full,
        "a completion of 0 tokens": empty_row,
        "one row masked": one_masked,
        "all masked": torch.zeros_like(full),
    }


@pytest.mark.parametrize("case", list(edge_masks()))
@pytest.mark.parametrize(("loss_type", "level", "mode"), CASES)
def test_edges_give_finite_losses_and_gradients(loss_type: str, level: str, mode: str | None, case: str) -> None:
    mask = edge_masks()[case]
    torch.manual_seed(0)
    policy = -torch.rand(3, 4)
    inputs = LossInputs(
        policy_logprobs=policy.clone().requires_grad_(),
        old_logprobs=policy - 0.1,
        sampling_logprobs=policy - 0.05,
        ref_logprobs=policy + 0.2,
        mask=mask,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
    )
    tokens = float(mask.sum())
    rules = make_rules(loss_type, level, correction_mode=mode, beta=0.1, tokens_per_micro_batch=tokens)
    output = computed(inputs, rules)
    assert output.loss.requires_grad, "a rank with nothing to learn still takes part in backward"
    output.loss.backward()
    grad = inputs.policy_logprobs.grad
    assert grad is not None
    assert bool(output.loss.isfinite())
    assert bool(grad.isfinite().all())
    assert grad[~mask].abs().sum() == 0, "tokens outside the mask must not learn"
    if case == "all masked":
        assert output.loss.item() == 0.0
    else:
        assert bool((grad[mask] != 0).all())


def test_a_masked_row_still_counts_in_the_mean_over_sequences_but_not_over_tokens() -> None:
    inputs = LossInputs(
        policy_logprobs=torch.zeros(2, 3),
        old_logprobs=torch.zeros(2, 3),
        sampling_logprobs=torch.zeros(2, 3),
        ref_logprobs=None,
        mask=torch.tensor([[False, True, True], [False, False, False]]),
        advantages=torch.tensor([-1.0, -5.0]),
    )
    assert grpo_loss(inputs, LossSettings(loss_type="grpo"), 2.0).loss.item() == 0.5
    assert grpo_loss(inputs, LossSettings(loss_type="bnpo"), 2.0).loss.item() == 1.0


def test_values_outside_the_mask_never_matter() -> None:
    problem = make_problem(seed=7)
    noise = np.random.default_rng(1).normal(size=problem.mask.shape) * (1 - problem.mask)
    for loss_type, level, mode in CASES:
        rules = make_rules(loss_type, level, correction_mode=mode, beta=0.1)
        clean = computed(make_inputs(problem), rules).loss.item()
        changed = dataclasses.replace(
            problem,
            policy=problem.policy + noise,
            old=problem.old - noise,
            sampling=problem.sampling + 2 * noise,
            ref=problem.ref - 3 * noise,
        )
        assert computed(make_inputs(changed), rules).loss.item() == pytest.approx(clean, rel=1e-12)


def test_what_metrics_read_is_detached() -> None:
    output = computed(
        make_inputs(make_problem()),
        make_rules("dapo", "token", correction_mode="token_mask", beta=0.1),
    )
    assert output.kl is not None
    assert output.correction is not None
    assert not output.ratio.requires_grad
    assert not output.kl.requires_grad
    assert not output.correction.requires_grad
    assert output.loss.requires_grad


def test_no_kl_and_no_correction_when_switched_off() -> None:
    inputs = dataclasses.replace(make_inputs(make_problem()), ref_logprobs=None)
    output = computed(inputs, make_rules("dapo", "token"))
    assert output.kl is None
    assert output.correction is None


def test_dapo_parts_add_up_to_the_mean_over_all_tokens() -> None:
    """Over 2 ranks x 2 micro-batches, the mean over ranks and micro-batches is the mean over every token."""
    parts = [make_problem(seed) for seed in range(4)]
    tokens = sum(int(part.mask.sum()) for part in parts)
    rules = make_rules("dapo", "token", tokens_per_micro_batch=tokens / 2 / 2)
    losses = [computed(make_inputs(part), rules).loss.item() for part in parts]
    every = [
        reference.token_loss(part, row, token, rules)
        for part in parts
        for row, token in np.argwhere(part.mask).tolist()
    ]
    assert sum(losses) / 4 == pytest.approx(sum(every) / tokens)


# The other losses, by hand


def one_token(ratio: float, advantage: float, **changes: object) -> tuple[float, float]:
    """Loss and its gradient by log p for one token with log p = -1, whose averages all are its own loss."""
    logprob = torch.tensor([[0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[0.0, -1.0 - math.log(ratio)]], dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs=logprob,
        old_logprobs=old,
        sampling_logprobs=old,
        ref_logprobs=None,
        mask=torch.tensor([[False, True]]),
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )
    settings = LossSettings(**{"correction": False, "max_completion_length": 1, **changes})  # type: ignore[arg-type]
    loss = grpo_loss(inputs, settings, 1.0).loss
    (gradient,) = torch.autograd.grad(loss, logprob)
    assert gradient[0, 0] == 0
    return loss.item(), gradient[0, 1].item()


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (4.0, 4.0), (9.0, 5.0)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_caps_the_weight_and_keeps_the_gradient(ratio: float, weight: float, advantage: float) -> None:
    loss, gradient = one_token(ratio, advantage, loss_type="cispo", epsilon_high=5.0)
    assert loss == pytest.approx(-weight * advantage * -1.0)
    assert gradient == pytest.approx(-weight * advantage)


def test_sapo_gates_by_the_sign_of_the_advantage() -> None:
    """At ratio 2 the gate is sigma(tau) 4 / tau; its slope by log p is c 4 sigma (1 - sigma)."""
    for advantage, tau in ((3.0, 1.0), (-3.0, 1.05)):
        gate = 1 / (1 + math.exp(-tau))
        loss, gradient = one_token(2.0, advantage, loss_type="sapo")
        assert loss == pytest.approx(-advantage * gate * 4 / tau)
        assert gradient == pytest.approx(-advantage * 2 * 4 * gate * (1 - gate))


def test_vespo_weighs_by_the_sign_of_the_advantage() -> None:
    """At w = 2: 2^k e^-lambda."""
    for advantage, k, rate in ((1.5, 2.0, 3.0), (0.0, 2.0, 3.0), (-1.5, 3.0, 2.0)):
        weight = 2**k * math.exp(-rate)
        loss, gradient = one_token(2.0, advantage, loss_type="vespo")
        assert loss == pytest.approx(weight * advantage)
        assert gradient == pytest.approx(-weight * advantage)


@pytest.mark.parametrize("ratio", [1e-12, 1e12])
@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_far_ratios_stay_finite(ratio: float, loss_type: str) -> None:
    loss, gradient = one_token(ratio, -1.0, loss_type=loss_type)
    assert math.isfinite(loss)
    assert math.isfinite(gradient)


def test_luspo_weighs_a_sequence_by_its_length() -> None:
    """Ratios 2 over two tokens and 3 over one, no clipping: the sum over tokens, then the mean over sequences."""
    old = -torch.log(torch.tensor([[1.0, 2.0, 2.0], [1.0, 3.0, 1.0]]))
    inputs = LossInputs(
        policy_logprobs=torch.zeros(2, 3),
        old_logprobs=old,
        sampling_logprobs=old,
        ref_logprobs=None,
        mask=torch.tensor([[False, True, True], [False, True, False]]),
        advantages=torch.tensor([1.0, 1.0]),
    )
    settings = LossSettings(loss_type="luspo", importance_sampling_level="sequence", epsilon_high=9.0, correction=False)
    assert grpo_loss(inputs, settings, 1.0).loss.item() == pytest.approx(-(2 * 2 + 3) / 2)


def test_the_off_policy_mask_by_hand() -> None:
    """Means of log(engine / policy): 0.5 and -3, an unknown token counting as no difference."""
    policy = torch.zeros(4, 3)
    sampling = torch.tensor([[9.0, 0.0, 1.0], [9.0, 0.0, 1.0], [9.0, -3.0, math.nan], [9.0, 2.0, math.nan]])
    mask = torch.tensor([[False, True, True]] * 4)
    kept = off_policy_mask(policy, sampling, mask, torch.tensor([-1.0, 0.0, -1.0, -1.0]), 0.5)
    assert kept.tolist() == [[True], [True], [True], [False]]
    assert off_policy_mask(policy, sampling, mask, -torch.ones(4), 0.49).tolist() == [[False], [False], [True], [False]]
    nothing = torch.zeros_like(mask)
    assert off_policy_mask(policy, sampling, nothing, -torch.ones(4), 0.1).all()
