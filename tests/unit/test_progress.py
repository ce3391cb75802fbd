"""The progress bar: phases, step, reward and speed; only where transformers would have drawn a bar."""

import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import ProgressCallback, TrainerCallback
from transformers import trainer as transformers_trainer

from colocate_rl import GRPOConfig, GRPOTrainer, engines
from colocate_rl.progress import replace_bar
from colocate_rl.progress.notebook import NotebookPhaseBar
from colocate_rl.progress.terminal import PhaseBar
from colocate_rl.progress.words import PHASE_NAMES, Speed
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]


def make(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GRPOTrainer:
    def build(*_: Any) -> LengthyEngine:
        time.sleep(0.2)  # long enough for the bar to be drawn
        return LengthyEngine()

    monkeypatch.setattr(engines, "build_engine", build)
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 32,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "vllm_logprob_gap_limit": 0,
    }
    args = GRPOConfig(str(folder), **{**values, **changes})
    prompts = datasets.Dataset.from_dict({"prompt": [f"{n}=" for n in range(4)]})
    return GRPOTrainer(tiny_model(), even_ids, args, prompts, processing_class=tiny_tokenizer())


def test_a_run_shows_its_phases_step_reward_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colocate_rl.progress.terminal.tqdm.monitor_interval", 0)
    shown: list[str] = []
    show = PhaseBar.show_phase

    def spy(self: PhaseBar, phase: str) -> None:
        show(self, phase)
        if self.training_bar is not None:
            shown.append(self.training_bar.desc.removesuffix(": "))

    monkeypatch.setattr(PhaseBar, "show_phase", spy)
    trainer = make(tmp_path, monkeypatch)
    assert "building engine" in capsys.readouterr().err
    assert not any(type(callback) is ProgressCallback for callback in trainer.callback_handler.callbacks)
    trainer.train()
    step = ["sync weights", "train", "generate", "train", "generate", "train", *["score", "train"] * 2]
    assert shown == step * 2
    drawn = capsys.readouterr()
    assert "2/2" in drawn.err
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    for reward in rewards:
        assert re.search(rf"reward {reward:.3f}, [\d,]+ tokens/s", drawn.err)
        assert f"'reward': '{reward:.4g}'" in drawn.out + drawn.err
    assert "engine/0" not in drawn.out + drawn.err, "a step's log above the bar is short"
    assert "train_runtime" in drawn.out + drawn.err


def test_speed_is_tokens_of_all_engines_over_whole_steps() -> None:
    speed = Speed()
    speed.restart(10)
    figures = {"reward": 0.25, "step_time": 2.0, "engine/0/tokens": 300, "engine/1/tokens": 100, "tokens": 9}
    assert speed.words(figures, 15) == ["reward 0.250", "40 tokens/s"]  # 400 tokens in 5 steps of 2 s
    assert speed.words(figures, 16) == ["reward 0.250", "200 tokens/s"]
    assert speed.words({"reward": None, "engine/0/tokens": 3}, 17) == []


def test_without_a_bar_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, monkeypatch, disable_tqdm=True)
    assert not any(isinstance(callback, ProgressCallback) for callback in trainer.callback_handler.callbacks)


class Handler:
    """The part of a trainer that holds its callbacks."""

    def __init__(self, *callbacks: TrainerCallback) -> None:
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))

    def remove_callback(self, kind: type) -> None:
        kept = [callback for callback in self.callback_handler.callbacks if type(callback) is not kind]
        self.callback_handler.callbacks = kept

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callback_handler.callbacks.append(callback)


class OwnBar(ProgressCallback):
    pass


def test_a_users_own_bar_stays_and_other_ranks_draw_none() -> None:
    own: Any = Handler(OwnBar())
    replace_bar(own, is_main=True)("generate")
    assert [type(callback) for callback in own.callback_handler.callbacks] == [OwnBar]
    other: Any = Handler(ProgressCallback())
    replace_bar(other, is_main=False)("generate")
    assert other.callback_handler.callbacks == []
    main: Any = Handler(ProgressCallback())
    replace_bar(main, is_main=True)
    assert [type(callback) for callback in main.callback_handler.callbacks] == [PhaseBar]


def test_a_notebook_gets_its_bar_and_a_table_with_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import notebook

    pages: list[str] = []
    output = SimpleNamespace(update=lambda page: pages.append(page.data))

    def display(page: Any, display_id: bool) -> Any:
        pages.append(page.data)
        return output

    monkeypatch.setattr(notebook.disp, "display", display)
    monkeypatch.setattr(transformers_trainer, "DEFAULT_PROGRESS_CALLBACK", notebook.NotebookProgressCallback)
    handler: Any = Handler(notebook.NotebookProgressCallback())
    show_phase = replace_bar(handler, is_main=True)
    (bar,) = handler.callback_handler.callbacks
    assert type(bar) is NotebookPhaseBar
    show_phase("build")  # before training there is nothing to draw it beside
    assert pages == []
    args: Any = SimpleNamespace(eval_strategy="no")
    state: Any = SimpleNamespace(max_steps=4, global_step=0, epoch=0.5, num_train_epochs=1, is_world_process_zero=True)
    bar.on_train_begin(args, state, None)
    show_phase("generate")
    assert PHASE_NAMES["generate"] in pages[-1]
    state.global_step = 1
    bar.on_step_end(args, state, None)
    bar.on_log(args, state, None, logs={"loss": 0.5, "reward": 0.75, "step_time": 2.0, "engine/0/tokens": 30})
    assert "reward 0.750, 15 tokens/s" in pages[-1]
    assert re.search(r"<th>Step</th>\s*<th>Training Loss</th>\s*<th>Reward</th>", pages[-1])
    assert re.search(r"<td>1</td>\s*<td>0.500000</td>\s*<td>0.750000</td>", pages[-1])


def test_drawing_needs_no_terminal() -> None:
    bar = PhaseBar()
    bar.show_phase("build")
    bar._building.fp = io.StringIO()
    bar.show_phase("train")
    assert bar._building is None


def test_a_step_without_a_new_batch_is_cut_down_too(capsys: pytest.CaptureFixture[str]) -> None:
    bar = PhaseBar()
    args: Any = SimpleNamespace()
    state: Any = SimpleNamespace(max_steps=4, global_step=1, epoch=0.5, is_world_process_zero=True)
    bar.on_train_begin(args, state, None)
    bar.on_log(args, state, None, logs={"loss": 0.5, "entropy": 0.1, "clip_ratio/low_mean": 0.0, "time/train_s": 1.0})
    bar.on_train_end(args, state, None)
    printed = capsys.readouterr()
    assert "entropy" in printed.out + printed.err
    assert "clip_ratio" not in printed.out + printed.err
