"""A run that was broken off anywhere goes on as if it had not been."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import TrainerCallback

from colocate_rl import engines
from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion
from colocate_rl.report import load_metrics
from colocate_rl.resume import HEADER, file_name
from colocate_rl.rollout.packed import pack_answers, unpack_answers
from colocate_rl.rollout.sampler import PROMPT_INDEX
from colocate_rl.rollout.stages import Answered
from tests import resuming
from tests.resuming import BackgroundStreamEngine, Ran, StreamEngine, assert_same_run, make, run

pytestmark = [pytest.mark.unit, pytest.mark.timeout(200)]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: StreamEngine())


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build_engine", lambda *_: BackgroundStreamEngine())


@pytest.mark.usefixtures("scripted")
def test_every_step_of_a_generation_batch(tmp_path: Path) -> None:
    """Steps 1 to 3 are inside the first batch, 4 at its end, 8 at that of the epoch, 9 inside the next."""
    whole = run(tmp_path, None)
    assert len([line for line in whole[0] if "loss" in line]) == 16
    for step in (1, 2, 3, 4, 8, 9):
        assert_same_run(run(tmp_path, step), whole)


@pytest.mark.usefixtures("scripted")
def test_log_probabilities_of_the_engine_as_old_ones(tmp_path: Path) -> None:
    chosen = {"old_logprobs": "sampling", "max_steps": 5}
    whole = run(tmp_path, None, **chosen)
    assert_same_run(run(tmp_path, 1, **chosen), whole)


@pytest.mark.usefixtures("scripted")
def test_a_reference_that_follows_the_policy(tmp_path: Path) -> None:
    chosen = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6, "max_steps": 7}
    whole = run(tmp_path, None, **chosen)
    assert_same_run(run(tmp_path, 3, **chosen), whole)


@pytest.mark.usefixtures("scripted")
def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    run(tmp_path, None, max_steps=4)
    held = {}
    for step in range(1, 5):
        with safe_open(tmp_path / f"checkpoint-{step}" / file_name(0), "pt") as file:
            header = json.loads(file.metadata()[HEADER])
            held[step] = len({name.split("/")[1] for name in file.keys() if name.startswith("slice/")})  # noqa: SIM118
        assert header["generation_batch"] == (2 * step) // 8
        assert header["position"] == (2 * step) % 8
        assert not list((tmp_path / f"checkpoint-{step}").glob("*.partial"))
    assert held == {1: 4, 2: 4, 3: 4, 4: 0}, "slices only of a batch that is used again"


@pytest.mark.usefixtures("scripted")
def test_old_checkpoints_go_with_their_files_and_models_alone_have_none(tmp_path: Path) -> None:
    run(tmp_path / "few", None, max_steps=3, save_total_limit=1)
    assert [file.parent.name for file in (tmp_path / "few").rglob(file_name(0))] == ["checkpoint-3"]
    run(tmp_path / "bare", None, max_steps=2, save_only_model=True)
    assert list((tmp_path / "bare").glob("checkpoint-*"))
    assert not list((tmp_path / "bare").rglob(file_name(0)))


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_batch_generated_ahead(tmp_path: Path, iterations: int) -> None:
    chosen = {"overlap": "one_step", "num_iterations": iterations, "max_staleness": 4, "max_steps": 8}
    whole = run(tmp_path, None, **chosen)
    assert max(line.get("staleness", 0) for line in whole[0]) > 0
    for step in (1, 2, 3):
        assert_same_run(run(tmp_path, step, **chosen), whole)


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize("changes", [{"data_seed": 77}, {"shuffle_dataset": False}], ids=str)
def test_answers_ahead_go_to_no_other_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Another order of the data set has other prompts next: completions of the old ones would be scored as theirs."""
    asked: dict[tuple[int, ...], str] = {}
    seen: list[tuple[str, tuple[int, ...]]] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend((prompt, tuple(ids)) for prompt, ids in zip(prompts, completion_ids, strict=True) if ids)
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setattr(resuming, "even_ids", reward)
    chosen = {"overlap": "one_step", "num_iterations": 1, "max_staleness": 4, "max_steps": 4, "eval_strategy": "no"}
    run(tmp_path, None, **chosen)
    asked.update((ids, prompt) for prompt, ids in seen)
    seen.clear()
    with caplog.at_level(logging.WARNING, "colocate_rl.resume"):
        run(tmp_path, 2, **chosen, **changes)
    assert seen
    assert all(asked.get(ids, prompt) == prompt for prompt, ids in seen), "answered by what another prompt was answered"
    assert "answers other prompts than this run" in caplog.text


@pytest.mark.usefixtures("in_background")
def test_what_auto_decides_otherwise_is_another_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A filter makes "auto" take the policy's log-probabilities: those of the engine in the slices are no such."""
    chosen = {"overlap": "one_step", "max_staleness": 4, "max_steps": 4, "eval_strategy": "no"}
    run(tmp_path, None, **chosen)
    with caplog.at_level(logging.WARNING, "colocate_rl.resume"):
        run(tmp_path, 1, **chosen, top_p=0.9)
    assert "saved with old_logprobs='sampling', and this run has 'policy'" in caplog.text


@pytest.mark.usefixtures("in_background")
def test_a_streamed_batch_that_is_used_twice(tmp_path: Path) -> None:
    chosen = {"overlap": "stream", "steps_per_generation": 2, "max_steps": 6}
    whole = run(tmp_path, None, **chosen)
    for step in (1, 2):
        assert_same_run(run(tmp_path, step, **chosen), whole)


class Interrupting(TrainerCallback):
    """Interrupts one run in the middle of a step, as a notebook's stop button does."""

    armed = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.armed and state.global_step == 2:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", ["none", "stream", "one_step"])
def test_an_interrupted_run_leaves_nothing_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """Neither figures that it did not come to log, nor lengths that deal prompts to engines otherwise."""
    engine = StreamEngine if overlap == "none" else BackgroundStreamEngine
    monkeypatch.setattr(engines, "build_engine", lambda *_: engine())
    chosen = {
        "overlap": overlap,
        "steps_per_generation": 2,
        "num_iterations": 1,
        "max_steps": 4,
        "logging_steps": 4,
        "max_staleness": 4,
        "learning_rate": 0.3,
        "optim": "sgd",  # Trainer keeps the moments of others
        "save_strategy": "no",
        "eval_strategy": "no",
        "log_completions": True,
        "num_completions_to_print": 0,
    }
    whole = run(tmp_path / "whole", None, **chosen)
    trainer = make(tmp_path / "again", **chosen)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.model.load_state_dict(start)
    trainer.train()
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    assert_same_run((trainer.state.log_history, weights), whole)
    assert trainer.state.log_history[0]["engine/0/prompts"] == whole[0][0]["engine/0/prompts"]


@pytest.mark.usefixtures("scripted")
def test_the_files_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    """A report must not take two runs for one; a resumed run goes on in its own files."""
    chosen = {"log_reward_trace": True, "eval_strategy": "no", "steps_per_generation": 2, "num_iterations": 1}
    steps = {}
    for name, step, length in (("first", None, 4), ("second", None, 2), ("resumed", 1, 3)):
        run(tmp_path, step, **chosen, max_steps=length)
        steps[name] = [record["step"] for record in load_metrics(tmp_path) if "reward" in record]
    assert steps == {"first": [1, 2, 3, 4], "second": [1, 2], "resumed": [1, 2, 3]}
    aside = [json.loads(line)["step"] for line in (tmp_path / "metrics.1.jsonl").read_text().splitlines()]
    assert max(aside) == 4
    assert not (tmp_path / "metrics.2.jsonl").exists()
    for name, last in (("rewards.1.jsonl", 3), ("rewards.jsonl", 2)):
        assert max(json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()) == last


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, r"it has no rollout_state_0\.safetensors"),
        ({"old_logprobs": "sampling"}, r"saved with old_logprobs='policy', and this run has 'sampling'"),
        ({"beta": 0.0}, r"saved with with_reference=True, and this run has False"),
    ],
)
def test_without_a_state_that_fits_the_batch_is_generated_again_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any] | None, words: str
) -> None:
    whole = run(tmp_path, None, max_steps=4)
    if changes is None:
        (tmp_path / "checkpoint-1" / file_name(0)).unlink()
    with caplog.at_level(logging.WARNING, "colocate_rl.resume"):
        found = run(tmp_path, 1, max_steps=4, **(changes or {}))
    warnings = [record.getMessage() for record in caplog.records if record.name == "colocate_rl.resume"]
    assert len(warnings) == 1
    assert re.search(words, warnings[0])
    assert "generated again by the resumed weights" in warnings[0]
    assert [line["step"] for line in found[0]] == [line["step"] for line in whole[0]]
    with pytest.raises(AssertionError):
        assert_same_run(found, whole)


@pytest.mark.usefixtures("scripted")
def test_an_evaluation_shifts_no_training_batch(tmp_path: Path) -> None:
    def losses(ran: Ran) -> list[float]:
        return [line["loss"] for line in ran[0] if "loss" in line]

    often = run(tmp_path / "often", None, eval_steps=1, max_steps=6, save_strategy="no")
    never = run(tmp_path / "never", None, eval_strategy="no", max_steps=6, save_strategy="no")
    assert losses(often) == pytest.approx(losses(never), rel=1e-6, abs=1e-7)


@pytest.mark.usefixtures("scripted")
def test_generation_batches_sample_from_different_streams(tmp_path: Path) -> None:
    """At learning rate 0 the weights stay, so equal rewards could only come from equal streams."""
    values = {"learning_rate": 0.0, "beta": 0.0, "eval_strategy": "no", "save_strategy": "no", "max_steps": 16}
    rewards = [line["reward"] for line in run(tmp_path, None, **values)[0] if "reward" in line]
    assert len(rewards) == len(set(rewards)) == 4


def test_answers_are_unpacked_as_they_were() -> None:
    rows = [{PROMPT_INDEX: index, "prompt": f"{index}="} for index in (5, 5, 9)]
    completions = [
        Completion([3, 4, 300], [-0.1, -1 / 3, -2.0], "length", 7, [True, False, True]),
        Completion([], [], "stop", 7),
        Completion([1], [-1e-30], "abort", 7),
    ]
    prompt_ids = [(1, 2), (1, 2), (8,)]
    answered = Answered(
        rows,
        prompt_ids,
        completions,
        [],
        texts=[[{"role": "assistant", "content": "ä"}]] * 3,
        figures={"tools/call_frequency": (1, 3)},
        places=[0, 1, 2],
        prompts={5: (1, 2), 9: (8,)},
        everyone={(5, 0): completions[0], (5, 1): completions[1], (9, 0): completions[2]},
    )
    assert unpack_answers(pack_answers(answered), rows, Collectives(torch.device("cpu"))) == answered


@pytest.mark.usefixtures("scripted")
def test_a_run_of_another_length_takes_the_same_checkpoint_up(tmp_path: Path) -> None:
    whole = run(tmp_path, None, max_steps=4, lr_scheduler_type="constant")
    trainer = make(tmp_path, max_steps=3, lr_scheduler_type="constant")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    last = [line for line in trainer.state.log_history if "loss" in line][-1]
    assert last["step"] == 3
    assert last["loss"] == pytest.approx([line for line in whole[0] if "loss" in line][2]["loss"], abs=1e-6)
