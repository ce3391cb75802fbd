"""The command line before anything heavy happens: help, spellings, and one message for what cannot work."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colocate_rl import cli, grpo
from colocate_rl.errors import ConfigError
from colocate_rl.options import SECTIONS, option_fields
from tests.tiny import save_tiny

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "vllm", "numpy", "pandas")


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Help


def test_help_needs_nothing_heavy_and_less_than_a_second() -> None:
    """Measured in processor time, which does not depend on what else the machine does."""
    before = os.times()
    finished = run("-X", "importtime", "-m", "colocate_rl.grpo", "--help")
    after = os.times()
    assert finished.returncode == 0
    assert finished.stdout.startswith("usage: colocate_rl.grpo")
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "argparse" in imported, "the list of imports was read"
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}
    seconds = after.children_user - before.children_user
    seconds += after.children_system - before.children_system
    assert seconds < 1.0


def test_help_lists_every_option_with_its_default() -> None:
    text = grpo.help_text()
    flags = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    joined = "".join(text.split())  # the help wraps its lines as it likes
    for item in option_fields():
        assert flags.count(item.name) == 1, item.name
        shown = f"{item.metadata['help']} (default: {item.default})"
        assert "".join(shown.split()) in joined, item.name
    for heading in SECTIONS.values():
        assert f"\n{heading}:\n" in text
    for flag in ("--model", "--dataset", "--eval_dataset", "--reward_funcs", "--live_table"):
        assert flag in text
    assert set(SECTIONS) <= {item.name for item in option_fields()}


def test_help_ends_quietly_within_python(capsys: pytest.CaptureFixture[str]) -> None:
    grpo.main(["--help"])
    captured = capsys.readouterr()
    assert captured.out == grpo.help_text() + "\n"
    assert captured.err == ""


def test_the_console_script_names_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, status in ((["--help"], 0), ([], 2), (["trian"], 2)):
        monkeypatch.setattr(sys, "argv", ["colocate-rl", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == status
        captured = capsys.readouterr()
        assert "grpo" in (captured.out if status == 0 else captured.err)
    monkeypatch.setattr(sys, "argv", ["colocate-rl", "grpo", "--help"])
    cli.main()
    assert "--num_vllm_gpus" in capsys.readouterr().out


# Spellings


def test_dashes_and_underscores_in_flags_but_not_in_values() -> None:
    words = [
        "--num-vllm-gpus",
        "2",
        "--model=my-model",
        "--reward-funcs=pack-age:f",
        "--output_dir",
        "some-folder",
        "-h",
        "--generation-kwargs",
        '{"a-b": 1}',
    ]
    assert grpo.normalise_flags(words) == [
        "--num_vllm_gpus",
        "2",
        "--model=my-model",
        "--reward_funcs=pack-age:f",
        "--output_dir",
        "some-folder",
        "-h",
        "--generation_kwargs",
        '{"a-b": 1}',
    ]


@pytest.mark.parametrize("model_flag", ["--model", "--model-name-or-path", "--model_name_or_path"])
@pytest.mark.parametrize("data_flag", ["--dataset", "--dataset-name"])
def test_trl_s_names_for_model_and_data(model_flag: str, data_flag: str) -> None:
    words = grpo.normalise_flags([model_flag, "a", data_flag, "b", "--max-steps", "3"])
    script, rest = grpo.build_parser().parse_known_args(words)
    assert (script.model, script.dataset) == ("a", "b")
    assert rest == ["--max_steps", "3"]


def parsed(*words: str) -> Any:
    """The configuration as the command line makes it."""
    return grpo._parse_config(*grpo.parse_script(["--model", "owner/some-model", *words]))


def test_settings_reach_the_configuration(tmp_path: Path) -> None:
    config = parsed("--output-dir", str(tmp_path), "--num-vllm-gpus", "2", "--max-steps=3", "--dtype", "float16")
    assert config.num_vllm_gpus == 2
    assert config.max_steps == 3
    assert config.output_dir == str(tmp_path)
    assert config.model_init_kwargs == {"dtype": "float16"}


def test_dtype_joins_the_other_model_arguments(tmp_path: Path) -> None:
    config = parsed(
        "--output_dir",
        str(tmp_path),
        "--model_init_kwargs",
        '{"revision": "v2", "dtype": "float32"}',
        "--dtype",
        "bfloat16",
        "--attn-implementation",
        "eager",
    )
    assert config.model_init_kwargs == {
        "revision": "v2",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
    }


def test_output_folder_is_named_after_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed()
    assert config.output_dir == "some-model-GRPO"


@pytest.mark.parametrize(
    ("wrong", "shown", "meant"),
    [
        ("--max_stepz", "--max_stepz", "--max_steps"),
        ("--num-vllm-gpu", "--num_vllm_gpu", "--num_vllm_gpus"),
        ("--los-type=grpo", "--los_type", "--loss_type"),
        ("--reward-func", "--reward_func", "--reward_funcs"),
    ],
)
def test_an_unknown_flag_suggests_the_nearest(wrong: str, shown: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(wrong, "3")
    assert str(caught.value) == f"There is no setting {shown}. Did you mean {meant}? See --help."


def test_an_unknown_flag_like_nothing_makes_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed("--xyzzy", "3")
    assert "--xyzzy" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_a_dictionary_that_is_no_json() -> None:
    with pytest.raises(ConfigError, match="valid JSON"):
        parsed("--generation_kwargs", "{presence_penalty: 0.5}")


@pytest.mark.parametrize("words", [["--vllm-devices", "2", "3"], ["stray"]])
def test_a_stray_word_is_a_setting_error(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[-1]):
        parsed(*words)


@pytest.mark.parametrize("words", [["--temperature", "hot"], ["--num-vllm-gpus"]])
def test_a_value_of_the_wrong_type_is_a_setting_error(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0].replace("-", "_").replace("__", "--", 1)):
        parsed(*words)


# One message for what cannot work


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A model, data and a reward that exist."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    save_tiny(tmp_path / "model", layers=1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    (tmp_path / "bare.jsonl").write_text('{"question": "1+1="}\n' * 8)
    module = f"cli_rewards_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text("def zero(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    return {"model": "./model", "dataset": "rows.jsonl", "reward_funcs": f"{module}:zero"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ["--model is missing", "--help"]),
        ({"dataset": None}, ["--dataset is missing", "--help"]),
        ({"reward_funcs": None}, ["--reward-funcs is missing", "--reward-model", "--help"]),
        ({"reward_model": "./gone"}, ["Reward model folder './gone' does not exist", "--reward-model"]),
        ({"reward_funcs": "get_soft_overlong_punishment"}, ["Write its call", "soft_punish_cache"]),
        ({"reward_timeout_s": "3"}, ["reward_timeout_s=3", "reward_num_workers"]),
        ({"model": "./nowhere"}, ["Model folder './nowhere' does not exist", "--model"]),
        ({"model": "a/b/c"}, ["Model folder 'a/b/c' does not exist. Check --model."]),
        ({"dataset": "nowhere.jsonl"}, ["Data set 'nowhere.jsonl' does not exist", "--dataset"]),
        ({"eval_dataset": "./gone"}, ["Data set './gone' does not exist", "--eval-dataset"]),
        ({"reward_funcs": "nowhere:zero"}, ["no module 'nowhere'", "--reward-funcs"]),
        ({"reward_funcs": "json:nothing"}, ["'json' has no function 'nothing'", "loads"]),
        ({"reward_funcs": "zero"}, ["package.module:function"]),
        ({"max_stepz": "3"}, ["no setting --max_stepz", "Did you mean --max_steps?"]),
        ({"num_generations": "1"}, ["num_generations is 1"]),
        ({"dataset": "bare.jsonl"}, ["no column 'prompt'", "question"]),
        ({"model": "."}, ["Model folder '.' has no config.json"]),
        ({"num_vllm_gpus": "0"}, ["num_vllm_gpus is 0"]),
        ({"resume_from_checkpoint": "true"}, ["there is no checkpoint in --output_dir 'model-GRPO'"]),
        ({"resume_from_checkpoint": "gone"}, ["'gone' is no folder"]),
        ({"resume_from_checkpoint": "model"}, ["'model' is no checkpoint", "trainer_state.json", "--model"]),
        ({"output_dir": "rows.jsonl"}, ["output_dir='rows.jsonl' cannot be a folder", "Choose another"]),
        ({"output_dir": "rows.jsonl/out"}, ["'rows.jsonl' is a file"]),
        ({"logging_steps": "0"}, ["non-zero --logging_steps"]),
        ({"accelerator_config": '{"foo": true}'}, ["unexpected keyword argument 'foo'"]),
        ({"deepspeed": "zero3.json"}, ["DeepSpeed and FSDP are not supported yet"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_one_message_and_a_failing_exit(
    files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    words: list[str],
) -> None:
    chosen = {**files, "per_device_train_batch_size": "8", "use_cpu": "True", **changes}
    arguments = [
        word for name, value in chosen.items() if value is not None for word in ("--" + name.replace("_", "-"), value)
    ]
    with pytest.raises(SystemExit) as ended:
        grpo.main(arguments)
    assert ended.value.code == 1
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("colocate_rl")]
    assert len(message) == 1, "one message, and no traceback"
    assert message[0].startswith("colocate_rl: error: ")
    for word in words:
        assert word in message[0]


def test_a_missing_model_folder_is_found_without_loading_torch() -> None:
    finished = run(
        "-X",
        "importtime",
        "-m",
        "colocate_rl.grpo",
        "--model",
        "./nowhere",
        "--dataset",
        "rows.jsonl",
        "--reward-funcs",
        "rewards:correct",
    )
    assert finished.returncode == 1
    lines = [line for line in finished.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == ["colocate_rl: error: Model folder './nowhere' does not exist. Check --model."]
    assert not re.search(r"\|\s+torch$", finished.stderr, re.MULTILINE)


def test_only_the_first_rank_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, spoken in (("0", 1), ("3", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            grpo.main([])
        assert ended.value.code == 1
        assert capsys.readouterr().err.count("--model is missing") == spoken
