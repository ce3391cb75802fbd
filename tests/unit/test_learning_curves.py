"""``benchmarks/learning_curves.py``: its comparisons, its modes' commands, and what it refuses before it trains."""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_curves, learning_trl
from benchmarks.processes import REPOSITORY, RunError

pytestmark = pytest.mark.unit

KEPT = REPOSITORY / "benchmarks/results/learning_curves_cpu.json"


def runs_of(**modes: tuple[float, ...]) -> list[dict[str, Any]]:
    """Runs whose figures are all the same number, by mode; seeds from 1."""
    return [
        {"mode": mode, "seed": seed, "accuracy_after": value, "rewards": [value] * 8}
        for mode, values in modes.items()
        for seed, value in enumerate(values, 1)
    ]


def command(mode: str, folder: Path, *, num_gpus: int = 0) -> list[str]:
    return learning_curves.command(mode, 3, 60, folder, "other-python", num_gpus=num_gpus)


def settings(words: list[str]) -> list[str]:
    """What the command line of the trainer says, without the folder that a run writes into."""
    module = next(place for place, word in enumerate(words) if word in ("colocate_rl.grpo", "benchmarks.learning_trl"))
    output = words.index(next(word for word in words if word.endswith(("/trl", "/transformers"))))
    return words[module + 1 : output] + words[output + 1 :]


def without_trl(folder: Path) -> Path:
    """An interpreter that cannot import TRL, whatever is installed here."""
    python = folder / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    python.chmod(0o755)
    return python


def test_modes_are_apart_by_standard_errors() -> None:
    compared = learning_curves.compare(runs_of(none=(0.8, 0.9, 1.0), trl=(0.7, 0.7, 0.7)))
    assert compared["modes"]["none"] == pytest.approx({"mean": 0.9, "standard_deviation": 0.1, "runs": 3})
    expected = {"difference": 0.2, "standard_errors": 0.2 / (0.1 / 3**0.5)}
    expected["paired_standard_errors"] = expected["standard_errors"]  # the second mode adds no spread
    for part in (compared, *compared["curves"].values()):
        assert part["differences"]["none - trl"] == pytest.approx(expected)


def test_what_a_seed_does_to_both_modes_is_no_noise_seed_by_seed() -> None:
    (pair,) = learning_curves.compare(runs_of(none=(0.2, 0.5, 0.8), trl=(0.21, 0.52, 0.83)))["differences"].values()
    assert abs(pair["standard_errors"]) < 0.1
    assert pair["paired_standard_errors"] == pytest.approx(-0.02 / (0.01 / 3**0.5))


def test_single_runs_have_no_standard_error() -> None:
    (pair,) = learning_curves.compare(runs_of(none=(0.5, 0.6), trl=(0.4,)))["differences"].values()
    assert pair == {"difference": pytest.approx(0.15), "standard_errors": None, "paired_standard_errors": None}
    other_seed = [*runs_of(none=(0.5,)), {"mode": "trl", "seed": 9, "accuracy_after": 0.4, "rewards": [0.4]}]
    (pair,) = learning_curves.compare(other_seed)["differences"].values()
    assert pair["paired_standard_errors"] is None


def test_curves_are_compared_over_their_last_quarter_and_as_a_whole() -> None:
    figures = {name: figure({"rewards": [0.0] * 6 + [0.5, 1.0]}) for name, figure in learning_curves.CURVES.items()}
    assert figures == {"reward_last_quarter": 0.75, "reward_all_steps": 1.5 / 8}
    assert learning_curves.last_quarter({"rewards": [0.0, 1.0]}) == 1.0, "at least one step"


def test_trl_reads_the_words_of_the_mode_transformers(tmp_path: Path) -> None:
    ours, trl = command("transformers", tmp_path), command("trl", tmp_path)
    assert trl[:3] == ["other-python", "-m", "benchmarks.learning_trl"]
    assert ours[0] == sys.executable
    assert settings(ours) == settings(trl)
    assert not any(word.startswith("--vllm") for word in ours)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_engines_leave_room_on_a_gpu_and_nothing_else_changes(tmp_path: Path, num_gpus: int) -> None:
    on_cpu, on_gpu = command("none", tmp_path), command("none", tmp_path, num_gpus=num_gpus)
    start = on_gpu.index("--vllm_gpu_memory_utilization")
    assert float(on_gpu[start + 1]) < 0.1
    added = {1: ["--vllm_devices", "0"], 2: []}[num_gpus]
    end = on_gpu.index("--vllm_engine_kwargs") + 2 + len(added)
    assert on_gpu[end - len(added) : end] == added
    assert on_gpu[:start] + on_gpu[end:] == on_cpu


@pytest.mark.parametrize(("mode", "expected"), [("one_step", ["4,7", "7,4", "4,7"]), ("trl", ["4", "7", "4"])])
def test_each_mode_goes_around_the_gpus(mode: str, expected: list[str]) -> None:
    assert [learning_curves.placed(mode, place, ["4", "7"]) for place in range(3)] == expected
    assert learning_curves.placed(mode, 1, []) == ""


def test_an_engine_shares_a_single_gpu() -> None:
    assert [learning_curves.placed(mode, 3, ["5"]) for mode in ("trl", "stream")] == ["5", "5"]


def test_runs_at_once_do_not_take_each_other_down() -> None:
    def fail() -> dict[str, Any]:
        raise RunError("no memory")

    found = dict(learning_curves.at_once({"bad": fail, "good": lambda: {"seed": 1}}, 2))
    assert found["good"] == {"seed": 1}
    assert str(found["bad"]) == "no memory"


def test_a_failed_run_names_its_last_error_and_its_log(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise ValueError('3 rows are too few')"]
    with pytest.raises(RunError, match=r"ValueError: 3 rows are too few \(exit status 1, log: .*trl\.log\)"):
        learning_curves.run("trl", 1, tmp_path, words, {})


def test_a_python_without_trl_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--modes", "transformers", "trl", "--output", str(tmp_path / "out")]
    assert learning_curves.main([*flags, "--trl-python", str(without_trl(tmp_path))]) == 1
    assert "cannot import: ModuleNotFoundError: No module named 'trl'. Name a Python that" in capsys.readouterr().err
    assert learning_curves.main([*flags, "--trl-python", str(tmp_path / "nowhere")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_python_of_trl_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert learning_curves.parse(["--trl-python", "env/bin/python"]).trl_python == str(tmp_path / "env/bin/python")
    assert learning_curves.parse(["--trl-python", "sh"]).trl_python == shutil.which("sh")


def test_refused_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning_curves.parse(["--parallel", "0"])
    assert "--parallel 0 would run nothing" in capsys.readouterr().err
    shutil.copy(KEPT, tmp_path / "results.json")
    assert learning_curves.main(["--steps", "7", "--output", str(tmp_path)]) == 1
    assert "is about 60 steps. Choose another --output." in capsys.readouterr().err


def test_kept_runs_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(KEPT, tmp_path / "results.json")
    kept = json.loads(KEPT.read_text())
    seeds = [str(seed) for seed in {run["seed"] for run in kept["runs"]}]
    assert learning_curves.main(["--seeds", *seeds, "--output", str(tmp_path)]) == 0
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000
    assert "seed by seed" in capsys.readouterr().out
    assert learning_curves.compare(kept["runs"])["modes"] == kept["modes"]


@dataclass
class Ours:
    seed: int = 1
    epsilon_high: float = 0.2
    generation_batch_size: int = 8
    overlap: str = "none"


@dataclass
class Theirs:
    seed: int = 42
    epsilon_high: float | None = None
    vllm_port: int = 0
    generation_batch_size: int = field(default=8)


def test_trl_gets_every_value_that_it_knows() -> None:
    assert learning_trl.theirs(Ours(seed=3), Theirs) == Theirs(seed=3, epsilon_high=0.2)


def test_a_value_that_trl_changes_is_refused() -> None:
    @dataclass
    class Rounding(Theirs):
        def __post_init__(self) -> None:
            self.epsilon_high = 0.3

    with pytest.raises(RunError, match=r"epsilon_high is 0\.3 there, 0\.2 here"):
        learning_trl.theirs(Ours(), Rounding)
    with pytest.raises(RunError, match="generation_batch_size is 8 there, 16 here"):
        learning_trl.theirs(Ours(generation_batch_size=16), Theirs)
