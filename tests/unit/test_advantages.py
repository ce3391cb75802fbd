"""Rewards to advantages against the reference, by hand, and where rewards are missing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colocate_rl.rollout.advantages import group_advantages, score_groups, weighted_sum
from tests.unit import reference

pytestmark = pytest.mark.unit

SCALES = ("group", "batch", "none")
NAN = math.nan

rewards_strategy = st.one_of(
    st.just(NAN), st.integers(-8, 8).map(lambda eighths: eighths / 8), st.sampled_from([0.0, 1.0])
)


@st.composite
def reward_tables(draw: st.DrawFn) -> list[list[float]]:
    """[P, G] with missing rewards, equal rewards and whole groups without any."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    return [[draw(rewards_strategy) for _ in range(size)] for _ in range(groups)]


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=150, deadline=None)
@given(table=reward_tables())
def test_advantages_equal_the_reference(scale: str, table: list[list[float]]) -> None:
    found = group_advantages(torch.tensor(table), scale)
    flat = [value for row in table for value in row]
    expected = reference.advantages(flat, len(table[0]), scale)
    # Groups of equal rewards: float32 rounding of the mean over the 1e-4 that divides it.
    torch.testing.assert_close(
        found.advantages.reshape(-1).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-4,
        atol=2e-3,
    )
    stds = [reference.unbiased_std([value for value in row if value == value]) for row in table]
    torch.testing.assert_close(found.group_std.double(), torch.tensor(stds, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert found.advantages.shape == found.rewards.shape == (len(table), len(table[0]))
    assert bool(found.advantages.isfinite().all())


@settings(max_examples=100, deadline=None)
@given(table=reward_tables(), shift=st.sampled_from([-2.0, 1.0, 4.0]))
def test_only_differences_within_a_group_count(table: list[list[float]], shift: float) -> None:
    """A constant added to one group's rewards changes nothing but the batch's standard deviation."""
    rewards = torch.tensor(table, dtype=torch.float64)
    moved = rewards.clone()
    moved[0] += shift
    for scale in ("group", "none"):
        before, after = group_advantages(rewards, scale), group_advantages(moved, scale)
        torch.testing.assert_close(before.advantages, after.advantages, rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_functions=st.integers(1, 4), rows=st.integers(1, 6))
def test_weighted_sum_equals_the_reference(data: st.DataObject, num_functions: int, rows: int) -> None:
    number = st.one_of(st.none(), st.integers(-16, 16).map(lambda eighths: eighths / 8))
    table = [[data.draw(number) for _ in range(num_functions)] for _ in range(rows)]
    weights = [data.draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])) for _ in range(num_functions)]
    tensor = torch.tensor([[NAN if value is None else value for value in row] for row in table])
    found = weighted_sum(tensor, torch.tensor(weights))
    expected = torch.tensor(reference.weighted_rewards(table, weights))
    torch.testing.assert_close(found, expected, equal_nan=True)


# By hand


def test_group_scale_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased standard deviation sqrt(1/3)."""
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), "group")
    size = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert found.advantages[0].tolist() == pytest.approx([size, -size, -size, size])
    assert found.group_std.tolist() == pytest.approx([math.sqrt(1 / 3)])


def test_batch_scale_by_hand() -> None:
    """Means are the groups' (2 and 6), the standard deviation that of 1, 3, 4, 8: sqrt(26 / 3)."""
    found = group_advantages(torch.tensor([[1.0, 3.0], [4.0, 8.0]]), "batch")
    std = math.sqrt(26 / 3) + 1e-4
    assert found.advantages.reshape(-1).tolist() == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std])


def test_no_scale_by_hand() -> None:
    found = group_advantages(torch.tensor([[1.0, 3.0], [4.0, 8.0]]), "none")
    assert found.advantages.tolist() == [[-1.0, 1.0], [-2.0, 2.0]]


def test_weighted_sum_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]])
    found = weighted_sum(rewards, torch.tensor([0.5, 10.0]))
    assert found[:3].tolist() == [20.5, 20.0, 0.5]
    assert math.isnan(found[3])


# Missing rewards


@pytest.mark.parametrize("scale", SCALES)
def test_a_missing_reward_leaves_the_others_alone(scale: str) -> None:
    """The completion gets 0; the others are compared among themselves, as if it were not there."""
    with_gap = group_advantages(torch.tensor([[1.0, NAN, 0.0, 1.0]]), scale)
    without = group_advantages(torch.tensor([[1.0, 0.0, 1.0]]), scale)
    assert with_gap.advantages[0, 1] == 0
    kept = with_gap.advantages[0, [0, 2, 3]].tolist()
    assert kept == pytest.approx(without.advantages[0].tolist())


@pytest.mark.parametrize("scale", SCALES)
def test_a_whole_group_without_rewards_learns_nothing(scale: str) -> None:
    found = group_advantages(torch.tensor([[NAN, NAN], [0.0, 1.0]]), scale)
    assert found.advantages[0].tolist() == [0.0, 0.0]
    assert found.advantages[1].abs().min() > 0.4
    assert found.group_std[0] == 0


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_without_any_reward_learns_nothing(scale: str) -> None:
    found = group_advantages(torch.full((2, 3), NAN), scale)
    assert found.advantages.abs().max() == 0


@pytest.mark.parametrize("scale", SCALES)
def test_a_single_reward_in_a_group_is_its_own_mean(scale: str) -> None:
    found = group_advantages(torch.tensor([[NAN, 5.0, NAN], [0.0, 1.0, 2.0]]), scale)
    assert found.advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert found.group_std[0] == 0


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_no_advantage(scale: str) -> None:
    found = group_advantages(torch.tensor([[0.5, 0.5, 0.5, 0.5]]), scale)
    assert found.advantages.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(("value", "size"), [(0.1, 8), (100.1, 7)])
def test_equal_rewards_give_no_advantage_whatever_they_are(value: float, size: int) -> None:
    """Adam would turn the rounding of one group into a step of the usual size if nothing else learns."""
    found = group_advantages(torch.full((1, size), value), "group")
    assert found.advantages.abs().max() == 0
    assert found.group_std.max() == 0


# GDPO


@settings(max_examples=150, deadline=None)
@given(data=st.data(), groups=st.integers(1, 4), size=st.integers(1, 6), num_functions=st.integers(1, 3))
def test_decoupled_advantages_equal_the_reference(
    data: st.DataObject, groups: int, size: int, num_functions: int
) -> None:
    table = [[data.draw(rewards_strategy) for _ in range(num_functions)] for _ in range(groups * size)]
    weights = [data.draw(st.sampled_from([-1.0, 0.5, 1.0, 2.0])) for _ in range(num_functions)]
    rewards = torch.tensor(table).view(groups, size, num_functions)
    found = score_groups(
        rewards,
        torch.tensor(weights),
        aggregation="normalize_then_sum",
        scale_rewards=data.draw(st.sampled_from(SCALES)),
    )
    expected = reference.decoupled_advantages(table, weights, size)
    torch.testing.assert_close(
        found.advantages.reshape(-1).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=2e-3
    )
    totals = reference.weighted_rewards(table, weights)
    torch.testing.assert_close(found.rewards.reshape(-1), torch.tensor(totals), equal_nan=True)


def test_a_function_of_small_spread_counts_as_much_as_one_of_large() -> None:
    """Rewards 0 or 1, and 0 or 100: summed, the second decides alone; decoupled, one of each is the average."""
    rewards = torch.tensor([[[1.0, 0.0], [1.0, 100.0], [0.0, 0.0], [0.0, 100.0]]])
    summed, decoupled = (
        score_groups(rewards, torch.ones(2), aggregation=aggregation, scale_rewards="group")
        for aggregation in ("sum_then_normalize", "normalize_then_sum")
    )
    assert summed.advantages[0, [0, 3]].tolist() == pytest.approx([-0.857, 0.857], abs=0.01)
    assert decoupled.advantages[0, [0, 3]].tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert decoupled.advantages[0, [1, 2]].tolist() == pytest.approx([1.2247, -1.2247], abs=1e-3)
    assert decoupled.rewards.tolist() == summed.rewards.tolist()


def test_decoupled_groups_without_differences_learn_nothing() -> None:
    rewards = torch.full((3, 4, 2), 0.1)
    rewards[1, :, 1] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    found = score_groups(rewards, torch.ones(2), aggregation="normalize_then_sum", scale_rewards="group")
    assert found.advantages[[0, 2]].abs().max() < 1e-12
    assert found.advantages[1].abs().min() > 0.5
    assert (found.group_std == 0).tolist() == [True, False, True]
