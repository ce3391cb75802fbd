"""Reward functions in worker processes: aligned with their rows, ended when slow, replaced when lost."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerState

from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring.contract import RewardOptions
from tests.unit.reward_functions import bad, by_row, calls

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

GROUPS = [4, 4, 4, 9, 4, 9, 2]
TEXTS = ["a", "bb", "ccc", "d", "ee", "ff", "g"]
COLUMNS = {"answer": [10, 20, 30, 40, 50, 60, 70]}


class Ask:
    """Asks reward functions in workers, and keeps them between calls."""

    def __init__(self) -> None:
        self.made: list[Rewards] = []

    def make(self, functions: Sequence[Any], **options: Any) -> Rewards:
        rewards = Rewards(functions, options=RewardOptions(**{"num_workers": 2, **options}))
        self.made.append(rewards)
        rewards.prepare(torch.device("cpu"))
        return rewards

    @staticmethod
    def score(rewards: Rewards, texts: Sequence[str] = TEXTS, groups: Sequence[int] = GROUPS, **helpers: Any) -> Any:
        columns = {name: values[: len(texts)] for name, values in COLUMNS.items()}
        ids = [[row] for row in range(len(texts))]
        return rewards.score(["p"] * len(texts), list(texts), ids, columns, groups=groups, **helpers)


@pytest.fixture
def ask() -> Iterator[Ask]:
    asked = Ask()
    yield asked
    for rewards in asked.made:
        rewards.close()


def pids(rewards: Rewards) -> list[int]:
    assert rewards._pool is not None
    return rewards._pool.pids


def test_values_stay_with_their_rows(ask: Ask) -> None:
    captured = 1000.0
    rewards = ask.make([by_row, lambda answer, **_: [captured + number for number in answer]])
    table = ask.score(rewards)
    expected = [11, 22, 33, 41, torch.nan, 62, 71]
    torch.testing.assert_close(table[:, 0], torch.tensor(expected, dtype=torch.float32), equal_nan=True)
    assert table[:, 1].tolist() == [1010, 1020, 1030, 1040, 1050, 1060, 1070]


def test_a_call_is_one_prompts_completions_in_another_process(ask: Ask) -> None:
    extras: dict[str, list[Any]] = {}
    figures: list[tuple[str, float]] = []
    rewards = ask.make([calls])
    state = TrainerState(global_step=12)
    helpers = {"log_extra": extras.__setitem__, "log_metric": lambda *pair: figures.append(pair)}
    assert ask.score(rewards, trainer_state=state, **helpers)[:, 0].tolist() == [4, 4, 4, 2, 4, 2, 1]
    assert set(extras["pid"]) <= set(pids(rewards))
    assert os.getpid() not in extras["pid"]
    assert extras["pid"][0] == extras["pid"][4], "rows of one prompt are one call"
    assert figures == [("seen step", 12.0)] * 3


def test_workers_work_at_the_same_time(ask: Ask, tmp_path: Path) -> None:
    def meet(answer: list[int], **_: Any) -> list[float]:
        (tmp_path / str(answer[0])).touch()
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return [float(len(list(tmp_path.iterdir())))] * len(answer)

    assert ask.score(ask.make([meet]), TEXTS[:2], [0, 1])[:, 0].tolist() == [2.0, 2.0]


def test_a_function_that_cannot_be_sent() -> None:
    lock = threading.Lock()

    def locked(**_: Any) -> list[float]:
        with lock:
            return []

    with pytest.raises(ConfigError, match=r"'locked' cannot be sent to a worker process.*reward_num_workers=0"):
        Rewards([locked], options=RewardOptions(num_workers=1))


def test_a_function_that_does_not_arrive(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleeting.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fleeting  # type: ignore[import-not-found]

    (tmp_path / "fleeting.py").unlink()
    with pytest.raises(RewardError, match="No module named 'fleeting'"):
        ask.make([fleeting.reward])


# What goes wrong costs one message


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("sleep", "took longer than 2 s"),
        ("spin", "took longer than 2 s"),
        ("die", "its worker process ended (signal 9"),
        ("leave", "SystemExit: 3"),
        ("vanish", "its worker process ended (status 3"),
        ("raise", "KeyError: 'told to'"),
    ],
)
def test_only_the_completion_that_fails_loses_its_reward(
    ask: Ask, caplog: pytest.LogCaptureFixture, word: str, reason: str
) -> None:
    rewards = ask.make([bad, by_row], timeout_s=2.0, on_error="none")
    texts = ["a", "b", word, "c", "d", "e", "f"]
    figures: dict[str, float] = {}
    table = ask.score(rewards, texts, log_metric=figures.__setitem__)
    assert table[:, 0].isnan().tolist() == [False, False, True, False, False, False, False]
    assert table[:, 1].tolist() == [11, 21, 30 + len(word), 41, 51, 61, 71], "the other function saw every row"
    assert figures == {"reward_errors/bad": pytest.approx(1 / 7), "reward_errors/by_row": 0.0}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "'bad' gave no reward for 1 of 7 completions" in warnings[0]
    assert f"Row 2: {reason}" in warnings[0]
    assert ask.score(rewards, TEXTS)[:, 0].tolist() == [1.0] * 7, "lost workers were replaced"
    assert len(pids(rewards)) == 2


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("sleep", "took longer than 0.5 s"),
        ("die", r"its worker process ended \(signal 9"),
        ("raise", r"KeyError: 'told to'(.|\n)*In the worker:(.|\n)*raise KeyError"),
    ],
)
def test_by_default_it_ends_the_run(ask: Ask, word: str, reason: str) -> None:
    rewards = ask.make([bad], timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(RewardError, match=rf"'bad' failed on 1 completion\(s\) of one prompt: {reason}"):
        ask.score(rewards, ["a", word, "b"], [0, 1, 2])
    assert time.monotonic() - start < 20
    assert ask.score(rewards, ["a", "b"], [0, 1])[:, 0].tolist() == [1.0, 1.0]


def test_an_error_elsewhere_ends_calls_without_a_limit(ask: Ask) -> None:
    async def failing(**_: Any) -> list[float]:
        raise KeyError("elsewhere")

    rewards = ask.make([failing, bad])
    start = time.monotonic()
    with pytest.raises(KeyError, match="elsewhere"):
        ask.score(rewards, ["sleep"] * 6, range(6))
    assert ask.score(rewards.__class__([bad]), ["a"], [0])[:, 0].tolist() == [1.0]
    rewards.close()
    assert time.monotonic() - start < 20


def test_a_breach_of_the_contract_is_no_accident(ask: Ask) -> None:
    rewards = ask.make([lambda **_: [1.0, 2.0]], on_error="none")
    with pytest.raises(RewardError, match=r"returned 2 value\(s\) for 3 completions"):
        ask.score(rewards, ["a", "b", "c"], [0, 0, 0])


# Lives


def gone(processes: Sequence[psutil.Process], seconds: float = 10) -> bool:
    _, alive = psutil.wait_procs(processes, seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_closing_ends_workers_and_what_they_started(ask: Ask, tmp_path: Path) -> None:
    def starts(completions: list[str], **_: Any) -> list[float]:
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "child").write_text(str(child.pid))
        time.sleep(60)
        return [1.0] * len(completions)

    rewards = ask.make([starts], timeout_s=1.0, on_error="none")
    workers = [psutil.Process(pid) for pid in pids(rewards)]
    assert ask.score(rewards, ["a"], [0]).isnan().all()
    assert gone([psutil.Process(pid) for pid in [int((tmp_path / "child").read_text())] if psutil.pid_exists(pid)])
    rewards.close()
    rewards.close()
    assert gone(workers)


RANK = """
import os, sys, torch
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring.contract import RewardOptions
from tests.unit.reward_functions import bad, by_row, calls


def own(completions, **_):  # of the script itself, which no worker may run again
    return [float(len(text)) for text in completions]


print("script", flush=True)
rewards = Rewards([own], options=RewardOptions(num_workers=2))
rewards.prepare(torch.device("cpu"))
print(rewards.score(["p"], ["four"], [[1]], {}).tolist(), flush=True)
print(*rewards._pool.pids, flush=True)
if sys.argv[1] == "hang":
    import time
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["exit", "hang"])
def test_workers_die_with_their_rank_and_never_run_its_script(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script), end], stdout=subprocess.PIPE, text=True, env=environment
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "script\n"
        assert rank.stdout.readline() == "[[4.0]]\n", "workers print nothing of the script's"
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        if end == "hang":
            rank.kill()
        rank.wait(20)
        assert gone(workers)


def test_closed_workers_say_so(ask: Ask) -> None:
    rewards = ask.make([by_row])
    rewards.close()
    with pytest.raises(RewardError, match=r"are closed: trainer\.close\(\) ended them"):
        ask.score(rewards)
