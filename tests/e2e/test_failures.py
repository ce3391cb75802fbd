"""What one rank raises ends all of them soon, with the original traceback shown once."""

import pytest

from tests.e2e.conftest import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_reward_that_raises_on_one_rank_ends_both(launcher: Launcher) -> None:
    done = launcher(2, **{"reward-funcs": "rewards:fails_on_rank_1"})
    assert done.status != 0
    assert done.seconds < 120  # start-up included
    assert done.text.count('KeyError: "the reward\'s own mistake"') == 1
    assert done.text.count("in fails_on_rank_1") == 1
    assert "rank 0 stops because rank 1 failed while scoring completions (KeyError)" in done.text


def test_an_engine_that_raises_on_one_rank_ends_both(launcher: Launcher) -> None:
    done = launcher(2, env={"BREAK_ENGINE_ON_RANK": "1"}, vllm_logprob_gap_limit=0)
    assert done.status != 0
    assert done.text.count("OSError: the engine's own mistake") == 1
    assert "rank 0 stops because rank 1 failed while generating completions (OSError)" in done.text


def test_a_reward_of_the_wrong_length_is_named_on_one_rank(launcher: Launcher) -> None:
    done = launcher(2, **{"reward-funcs": "rewards:too_few"})
    assert done.status != 0
    assert done.text.count("Reward function 'too_few' returned 1 value(s) for 4 completions") == 1
