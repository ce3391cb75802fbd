"""What would train wrongly without a word is refused or warned of."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn

from colocate_rl import GRPOConfig, GRPOTrainer, trl_only
from colocate_rl.collectives import Collectives
from colocate_rl.completions import CompletionLog, sendable
from colocate_rl.errors import ConfigError, DataError, PlacementError
from colocate_rl.metrics import MetricBuffer
from colocate_rl.preflight import Given, check_run, make_rewards
from colocate_rl.rollout.rewardlog import metric_logger
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.training.policy import disable_dropout, has_dropout
from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("key", ["temperature", "top_p", "max_tokens", "n", "seed", "logprobs"])
def test_sampling_keys_that_the_loss_would_not_see(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"generation_kwargs holds '{key}'"):
        GRPOConfig(str(tmp_path), generation_kwargs={key: 1})


@pytest.mark.parametrize("key", ["model", "load_format", "logprobs_mode"])
def test_engine_arguments_that_the_run_decides(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"vllm_engine_kwargs holds '{key}'"):
        GRPOConfig(str(tmp_path), vllm_engine_kwargs={key: "x"})


def test_sampling_filters_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        GRPOConfig(str(tmp_path))
        assert not caplog.records
        GRPOConfig(str(tmp_path), top_p=0.9, top_k=5)
    assert "top_p, top_k" in caplog.text


@pytest.mark.parametrize(
    "setting", [{"torch_compile": True, "torch_compile_mode": "max-autotune"}, {"ignore_data_skip": True}]
)
def test_settings_of_trainer_that_do_not_fit(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        GRPOConfig(str(tmp_path), **setting)


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_loaders_that_cut_rows_otherwise(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        GRPOConfig(str(tmp_path), accelerator_config={name: True})


def test_sharding_chosen_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP"):
        GRPOConfig(str(tmp_path))


def test_what_one_reward_changes_the_next_does_not_see() -> None:
    def spoil(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        completions.clear()
        completion_ids[0].clear()
        answer.clear()
        return [0.0, 0.0]

    def count(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [float(len(completions) + len(answer)), float(len(completion_ids[0]))]

    table = Rewards([spoil, count]).score(["p", "p"], ["a", "b"], [[1, 2], [3]], {"answer": ["x", "y"]})
    assert table[:, 1].tolist() == [4.0, 2.0]


@pytest.mark.parametrize("name", ["reward", "loss", "time/mine", "eval_reward", "kl"])
def test_a_metric_under_the_trainers_own_name(name: str) -> None:
    with pytest.raises(ValueError, match="of that name itself"):
        metric_logger(MetricBuffer())(name, 1.0)


def test_a_metric_under_another_name() -> None:
    metrics = MetricBuffer()
    metric_logger(metrics)("rewarding", 2.0)
    assert metrics.flush(Collectives(torch.device("cpu"))) == {"rewarding": 2.0}


@pytest.mark.parametrize("value", [None, "high", [1.0], torch.ones(3), np.ones(2)], ids=repr)
def test_a_metric_that_is_not_one_number(value: Any) -> None:
    metrics = MetricBuffer()
    metric_logger(metrics)("mine", 1.0)
    with pytest.raises(ValueError, match=r"(?s)log_metric\('mine'\) got .*one number"):
        metric_logger(metrics)("mine", value)
    assert metrics.flush(Collectives(torch.device("cpu"))) == {"mine": 1.0}


@pytest.mark.parametrize(
    ("extra", "written"),
    [
        ([{}, {}], ["{}", "{}"]),
        ([[{}], []], ["[{}]", "[]"]),
        ([2**70, 1], [str(2**70), "1"]),
        (["\ud800", "fine"], ["\\ud800", "fine"]),
    ],
    ids=["empty mappings", "lists of them", "large numbers", "half a character"],
)
def test_extras_that_no_parquet_column_holds_are_written_as_text(
    tmp_path: Path, extra: list[Any], written: list[str]
) -> None:
    from rich.console import Console

    log = CompletionLog(4, ["r"])
    log.add(["p", "p"], ["a", "b"], [[1.0], [2.0]], [0.0, 0.0], {"x": extra})
    console = Console(file=(tmp_path / "printed").open("w", encoding="utf-8"))
    rows = log.flush(1, tmp_path, num_to_print=None, unique_prompts=False, console=console)
    assert [row["x"] for row in rows] == written
    kept = datasets.Dataset.from_parquet(str(tmp_path / "completions_00001.parquet"), cache_dir=str(tmp_path / "cache"))
    assert kept["x"][:] == written
    assert kept["r"][:] == [1.0, 2.0]


def test_extras_that_cannot_be_sent_to_another_rank_are_sent_as_text() -> None:
    fine = [{"a": 1}, torch.ones(1)]
    assert sendable(fine) is fine
    assert [text[:7] for text in sendable([lambda: 0, threading.Lock(), "\ud800"])] == ["<functi", "<unlock", "\\ud800"]


def test_extras_of_mixed_types_do_not_end_a_run(tmp_path: Path) -> None:
    from rich.console import Console

    log = CompletionLog(4, ["r"])
    log.add(["p", "p"], ["a", "b"], [[1.0], [2.0]], [0.0, 0.0], {"x": [1, [2]]})
    log.add(["p"], ["c"], [[3.0]], [0.0], {})
    rows = log.flush(1, tmp_path, num_to_print=None, unique_prompts=False, console=Console(quiet=True))
    assert len(rows) == 3
    kept = datasets.Dataset.from_parquet(str(tmp_path / "completions_00001.parquet"), cache_dir=str(tmp_path / "cache"))
    assert kept["r"][:] == [1.0, 2.0, 3.0]
    assert kept["x"][:] == ["1", "[2]", "None"]


def test_an_extra_under_the_name_of_a_reward_does_not_end_a_run(tmp_path: Path) -> None:
    from rich.console import Console

    log = CompletionLog(4, ["r", "s"])
    log.add(["p", "p"], ["a", "b"], [[1.0, 3.0], [2.0, 4.0]], [0.0, 0.0], {"r": [1, [2]]})
    rows = log.flush(1, tmp_path, num_to_print=None, unique_prompts=False, console=Console(quiet=True))
    assert [(row["r"], row["s"]) for row in rows] == [("1", 3.0), ("[2]", 4.0)], "as in TRL it takes the reward's place"


def test_dropout_is_found_and_switched_off_wherever_it_is_kept() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    model[1].attention_dropout = 0.2  # type: ignore[assignment]
    assert has_dropout(model)
    disable_dropout(model)
    assert not has_dropout(model)
    assert (model[0].p, model[1].attention_dropout) == (0.0, 0.0)
    assert not has_dropout(tiny_model())


def check(folder: Path, rows: datasets.Dataset, tokenizer: Any = None, **changes: Any) -> None:
    args = GRPOConfig(str(folder / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=4)
    check_run(
        args,
        Collectives(args.device),
        Given(
            model=str(folder),
            tokenizer=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=rows,
            eval_dataset=None,
            **changes,
        ),
    )


@pytest.mark.parametrize("column", ["completions", "prompts", "trainer_state", "log_metric"])
def test_columns_that_are_reward_arguments(tmp_path: Path, column: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(DataError, match=column):
        check(tmp_path, datasets.Dataset.from_dict({"prompt": ["a", "b"], column: ["x", "y"]}))


def test_ids_the_model_does_not_have(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"]})
    check(tmp_path, rows)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<extra{number}>" for number in range(40)])
    with pytest.raises(DataError, match=f"id 2[89][0-9].*{tiny_config().vocab_size} embeddings"):
        check(tmp_path, datasets.Dataset.from_dict({"prompt": ["a", "<extra39>"]}), tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    with pytest.raises(ConfigError, match="pad token has id"):
        check(tmp_path, rows, tokenizer)


class Judge:
    def __call__(self, completions: list[str], verdict: list[str], **kwargs: Any) -> list[float]:
        return [float(text == right) for text, right in zip(completions, verdict, strict=True)]


def with_columns(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def with_helper(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def without_rest(completions: list[str], answer: list[str]) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "settings", "words"),
    [
        (with_columns, {}, None),
        (with_helper, {}, None),
        (len, {}, "'len' cannot be called"),
        (Judge(), {}, "missing a required argument: 'verdict'"),
        (without_rest, {}, "got an unexpected keyword argument"),
        (with_columns, {"remove_unused_columns": True}, "missing a required argument: 'answer'"),
        (with_helper, {"reward_num_workers": 1}, None),
    ],
)
def test_a_reward_function_that_cannot_be_called(
    tmp_path: Path, function: Any, settings: dict[str, Any], words: str | None
) -> None:
    """Found before a model is loaded, with what the function would be given."""
    rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]})
    args = GRPOConfig(str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, **settings)
    rewards = make_rewards(args, function, None)
    columns = [] if args.remove_unused_columns else ["answer"]
    if words is None:
        rewards.check_arguments(columns, "train_dataset")
        return
    with pytest.raises(ConfigError, match=r"Reward function '.*' cannot be called: .*completions, completion_ids"):
        rewards.check_arguments(columns, "train_dataset")
    save_tiny(tmp_path / "model")
    given = Given(model=str(tmp_path / "model"), reward_funcs=function, train_dataset=rows)
    with pytest.raises(ConfigError, match=words):
        check_run(args, Collectives(torch.device("cpu")), given)


def without_the_rest(
    prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any
) -> list[float]:
    return [0.0 for _ in completions]


def of_column(completion: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completion]


def test_columns_that_no_reward_function_is_given(tmp_path: Path) -> None:
    """A data set made for fine-tuning has a column of completions, which is not passed on, as in TRL."""
    save_tiny(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "1+2="], "completion": ["2", "3"]})
    args = GRPOConfig(str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=4)
    given = Given(model=str(tmp_path / "model"), reward_funcs=without_the_rest, train_dataset=rows)
    check_run(args, Collectives(torch.device("cpu")), given)
    with pytest.raises(ConfigError, match="missing a required argument: 'completion'"):
        check_run(args, Collectives(torch.device("cpu")), replace(given, reward_funcs=of_column))


def test_evaluation_sets_need_the_columns_too(tmp_path: Path) -> None:
    """Before the run, not at its first evaluation; and a column never takes the place of what was sampled."""
    save_tiny(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]})
    args = GRPOConfig(str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=4)
    given = Given(model=str(tmp_path / "model"), reward_funcs=with_columns, train_dataset=rows, eval_dataset=rows)
    check_run(args, Collectives(torch.device("cpu")), given)
    bare = {"hard": rows.remove_columns("answer")}
    with pytest.raises(ConfigError, match=r"'answer'\. For eval_dataset\['hard'\] it is given prompts"):
        check_run(args, Collectives(torch.device("cpu")), replace(given, eval_dataset=bare))
    taken = rows.add_column("completions", ["2", "3"])
    with pytest.raises(DataError, match=r"eval_dataset has column\(s\) completions"):
        check_run(args, Collectives(torch.device("cpu")), replace(given, eval_dataset=taken))


def test_one_process_where_several_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate's launcher leaves behind on a machine without a GPU."""
    rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]})
    args = GRPOConfig(str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, num_vllm_gpus=2)
    given = Given(model=str(tmp_path / "model"), reward_funcs=with_columns, train_dataset=rows)
    for port, words in ((None, r"at most 1\."), ("29500", "torchrun --nproc_per_node")):
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(PlacementError, match=words):
            check_run(args, Collectives(torch.device("cpu")), given)


@pytest.mark.parametrize("name", list(trl_only.TRL_METHODS))
def test_a_subclass_written_for_trl_whose_method_nobody_would_call(name: str) -> None:
    class Mixin:
        pass

    setattr(Mixin, name, lambda self: None)
    with pytest.raises(ConfigError, match=f"Mine overrides {name}, which TRL's trainer calls"):
        type("Mine", (Mixin, GRPOTrainer), {})


def test_a_subclass_whose_methods_are_called() -> None:
    class Mine(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().compute_loss(*args, **kwargs) * 2

        def create_optimizer(self, model: Any = None) -> Any:
            return super().create_optimizer(model)

    assert issubclass(type("Again", (Mine,), {}), Mine)
