"""Counting within generation batches, against a walk through the whole run."""

import pytest

from colocate_rl.positions import Positions

pytestmark = pytest.mark.unit

SHAPES = [(1, 1, 1), (4, 1, 4), (4, 2, 4), (4, 1, 2), (2, 3, 4), (6, 2, 3), (2, 1, 6)]
"""Slices, iterations, micro-steps of an optimizer step."""


@pytest.mark.parametrize(("num_slices", "iterations", "accumulation"), SHAPES)
def test_counters_are_those_of_a_walk(num_slices: int, iterations: int, accumulation: int) -> None:
    positions = Positions(num_slices, num_slices * iterations, accumulation)
    done = 0
    for batch in range(5):
        for iteration in range(iterations):
            for number in range(num_slices):
                assert (positions.batch, positions.slice) == (batch, number)
                assert positions.is_first_iteration == (iteration == 0)
                assert positions.opens_batch == (iteration == number == 0)
                positions.advance()
                assert positions.batch_under_way == batch
                done += 1
                if done % accumulation == 0:
                    positions.end_step()


@pytest.mark.parametrize(("num_slices", "iterations", "accumulation"), SHAPES)
def test_when_the_policy_moves_before_a_slice_is_trained(num_slices: int, iterations: int, accumulation: int) -> None:
    """From every place in a run, also one where a resumed run begins, look ahead slice by slice."""
    per_batch = num_slices * iterations
    for start in range(3 * per_batch):
        if start % accumulation:
            continue  # a run is resumed between optimizer steps
        positions = Positions(num_slices, per_batch, accumulation)
        positions.resume_at(start)
        assert (positions.micro_step, positions.since_update) == (start, 0)
        for ahead in range(num_slices):
            assert positions.moves_before((start + ahead) % num_slices) == (ahead // accumulation > 0)


def test_within_an_optimizer_step_the_next_update_is_nearer() -> None:
    positions = Positions(num_slices=2, micro_steps_per_batch=2, accumulation_steps=6)
    for _ in range(4):
        positions.advance()
    assert [positions.moves_before(number) for number in (0, 1)] == [False, False]
    positions.advance()
    assert [positions.moves_before(number) for number in (1, 0)] == [False, True]


def test_whether_updates_share_a_batch() -> None:
    assert Positions(4, 8, 4).several_updates
    assert not Positions(4, 4, 4).several_updates
    assert not Positions(2, 2, 6).several_updates
