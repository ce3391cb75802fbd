"""Scalars and completions reach the trackers that report_to names, from the main rank only."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers.integrations.integration_utils import TrackioCallback, WandbCallback

from colocate_rl import GRPOConfig, GRPOTrainer, engines, trackers
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]


class Table:
    """The arguments of ``wandb.Table`` (0.31) and ``trackio.Table`` (0.43) that both know."""

    def __init__(
        self,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        rows: Any = None,
        dataframe: Any = None,
        optional: bool = True,
        allow_mixed_types: bool = False,
        log_mode: str | None = "IMMUTABLE",
    ) -> None:
        assert columns is not None
        assert data is not None
        assert all(len(row) == len(columns) for row in data)
        kinds = [{type(row[place]) for row in data} - {type(None)} for place in range(len(columns))]
        assert allow_mixed_types or all(len(kind) <= 1 for kind in kinds)
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


class Tracker(ModuleType):
    """A module with the calls that transformers' callbacks make of ``wandb`` and ``trackio``, which it writes down."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "1.0"
        self.Table = Table
        self.logged: list[dict[str, Any]] = []
        self.started: dict[str, Any] | None = None
        self.config: Any = type("Config", (dict,), {"update": lambda self, values, allow_val_change: None})()
        self.run: Any = None
        empty = SimpleNamespace(get=lambda: None)
        self.context_vars = SimpleNamespace(current_space_id=empty, current_project=empty)

    def init(self, project: str, name: str | None = None, **more: Any) -> None:
        self.started = {"project": project, "name": name, **more}
        self.run = SimpleNamespace(summary={}, _label=lambda code: None)

    def define_metric(self, name: str, step_metric: str | None = None, step_sync: bool | None = None) -> None: ...

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert self.started is not None
        self.logged.append(metrics)

    def finish(self) -> None: ...


@pytest.fixture
def tracker_modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracker]:
    from importlib.machinery import ModuleSpec

    modules = {name: Tracker(name) for name in ("wandb", "trackio")}
    config_util = ModuleType("wandb.sdk.lib.config_util")
    config_util.ConfigError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", config_util)
    for parent in ("wandb.sdk", "wandb.sdk.lib"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> GRPOTrainer:
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())
    args = GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=32,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        vllm_logprob_gap_limit=0,
        log_completions=True,
        num_completions_to_print=0,
        **changes,
    )
    prompts = datasets.Dataset.from_dict({"prompt": [f"{n}=" for n in range(4)]})
    trainer = GRPOTrainer(tiny_model(), even_ids, args, prompts, processing_class=tiny_tokenizer())
    trainer.train()
    return trainer


def kept_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / "completions" / f"completions_{step:05d}.parquet").to_pylist()
    return rows


def test_each_tracker_gets_scalars_and_the_table_of_every_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker_modules: dict[str, Tracker]
) -> None:
    trainer = train(tmp_path, monkeypatch, report_to=["wandb", "trackio", "tensorboard"])
    rewards = {line["step"]: line["reward"] for line in trainer.state.log_history if "reward" in line}
    assert sorted(rewards) == [1, 2]
    for module in tracker_modules.values():
        scalars = {line["train/global_step"]: line for line in module.logged if "train/reward" in line}
        tables = {line["train/global_step"]: line["completions"] for line in module.logged if "completions" in line}
        assert {step: line["train/reward"] for step, line in scalars.items()} == rewards
        assert sorted(tables) == [1, 2]
        for step, table in tables.items():
            assert table.rows == kept_rows(tmp_path, step)
            assert len(table.rows) == 4

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next((tmp_path / "runs").rglob("events.out.tfevents*"))
    read = EventAccumulator(str(events), size_guidance={"tensors": 0, "scalars": 0})
    read.Reload()
    assert {event.step: event.value for event in read.Scalars("train/reward")} == pytest.approx(rewards)
    tables = {e.step: e.tensor_proto.string_val[0].decode() for e in read.Tensors("completions/text_summary")}
    assert sorted(tables) == [1, 2]
    for step, text in tables.items():
        rows = kept_rows(tmp_path, step)
        lines = text.split("\n")
        assert len(lines) == 2 + len(rows)
        assert lines[0].replace("&#95;", "_") == "| " + " | ".join(rows[0]) + " |"
        for line, row in zip(lines[2:], rows, strict=True):
            assert line.count("|") == len(row) + 1
            assert line.startswith(f"| {step} | {row['prompt']} |")


def test_cells_of_a_markdown_table_hold_no_markup() -> None:
    import html

    hostile = "a|b\n<script>x</script> **b** [l](javascript:1) `c` \\| ---"
    text = trackers.as_markdown(["n|ame", "value"], [[hostile, 0.123456], ["---", None]])
    lines = text.split("\n")
    assert lines[1:2] + lines[3:] == ["|---|---|", "| --- | None |"]
    cell, number = lines[2].removeprefix("| ").removesuffix(" |").split(" | ")
    assert number == "0.1235"
    assert not set(cell.replace("<br>", "").replace("&#", "")) & set("<>|*_`\\[]()\"'!#")
    assert html.unescape(cell.replace("<br>", "\n")) == hostile


def test_nothing_is_sent_without_rows_and_missing_extras_are_empty(tracker_modules: dict[str, Tracker]) -> None:
    callbacks = [WandbCallback(), TrackioCallback()]
    for module in tracker_modules.values():
        module.init("p")
    trackers.send_completions(callbacks, [], 3)
    assert [module.logged for module in tracker_modules.values()] == [[], []]
    trackers.send_completions(callbacks, [{"step": 3, "x": 1}, {"step": 3, "y": "b"}], 3)
    for module in tracker_modules.values():
        (line,) = module.logged
        assert line["train/global_step"] == 3
        assert line["completions"].rows == [{"step": 3, "x": 1, "y": None}, {"step": 3, "x": None, "y": "b"}]
