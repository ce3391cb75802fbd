"""What a run writes about itself: settings, placement and versions at its start, the page at its end."""

import json
import logging
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colocate_rl import GRPOConfig, runreport
from colocate_rl.placement import Placement
from colocate_rl.runreport import RunReport, run_facts

pytestmark = pytest.mark.unit


def config(folder: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(str(folder), use_cpu=True, per_device_train_batch_size=8, **changes)


def placement() -> Placement:
    return Placement.on_cpu(num_ranks=2, num_engines=1, num_cores=2, tensor_parallel_size=1, devices=None)


STATE: Any = SimpleNamespace(is_world_process_zero=True)


def test_facts_are_what_ran_and_hold_no_secret(tmp_path: Path) -> None:
    args = config(
        tmp_path,
        temperature=0.7,
        hub_token="hf_secret",
        model_init_kwargs={"token": "hf_secret", "revision": "v2", "nested": {"api_key": "hf_secret"}},
        max_tokens_per_micro_batch=512,
    )
    RunReport(placement()).on_train_begin(args, STATE, None)
    text = (tmp_path / "run.json").read_text("utf-8")
    assert "hf_secret" not in text
    facts = json.loads(text)
    changed, settings = facts["Settings that differ from their defaults"], facts["All settings"]
    assert changed["temperature"] == settings["temperature"] == 0.7
    assert changed["max_tokens_per_micro_batch"] == 512
    assert changed["model_init_kwargs"]["revision"] == "v2"
    assert "top_p" not in changed
    assert settings["top_p"] == 1.0
    assert "optim" not in changed
    assert facts["Versions"]["torch"] == metadata.version("torch")
    assert "rank 1" in facts["Placement"]["training and engines"]


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    report = RunReport(placement())
    other: Any = SimpleNamespace(is_world_process_zero=False)
    report.on_train_begin(config(tmp_path / "out"), other, None)
    report.on_train_end(config(tmp_path / "out"), other, None)
    assert not (tmp_path / "out").exists()


def test_the_page_is_written_and_a_failure_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report, args = RunReport(placement()), config(tmp_path, temperature=0.7)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    report.on_train_begin(args, STATE, None)
    report.on_train_end(args, STATE, None)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "temperature" in page
    assert metadata.version("torch") in page

    def broken(folder: str) -> Path:
        raise OSError(f"{folder}: disk full")

    monkeypatch.setattr(runreport, "write_page", broken)
    with caplog.at_level(logging.WARNING):
        report.on_train_end(args, STATE, None)
    assert "report.html could not be written" in caplog.text
    assert "disk full" in caplog.text


def test_facts_name_no_package_that_is_not_there(tmp_path: Path) -> None:
    versions = run_facts(config(tmp_path), placement())["Versions"]
    assert {"python", "torch", "transformers"} <= versions.keys() <= {"python", *runreport.PACKAGES}
