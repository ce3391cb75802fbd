"""What one rank raises ends all of them soon, with the original traceback shown once."""

import psutil
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


@pytest.mark.slow
def test_a_reward_of_the_wrong_length_is_named_on_one_rank(launcher: Launcher) -> None:
    done = launcher(2, **{"reward-funcs": "rewards:too_few"})
    assert done.status != 0
    assert done.text.count("Reward function 'too_few' returned 1 value(s) for 4 completions") == 1


def test_ranks_and_engines_go_with_a_killed_launcher(launcher: Launcher) -> None:
    log = launcher.folder / "log"
    run = launcher.start(2, log, overlap="one_step", max_steps=100000)
    family = psutil.Process(run.pid).children(recursive=True)
    kinds = [" ".join(process.cmdline()) for process in family]
    assert sum("colocate_rl.engine.child" in kind for kind in kinds) == 2, log.read_text()[-3000:]
    run.kill()  # it can end nothing itself any more
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    run.wait()
