"""Settings from a file: the same as on the command line, which wins; and the recipes that come with the project."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from colocate_rl import GRPOTrainer, engines, grpo, peft_flags
from colocate_rl.errors import ConfigError
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_padding_free_run import LengthyEngine, even_ids

pytestmark = pytest.mark.unit

RECIPES = Path(__file__).parents[2] / "examples/recipes"


def parsed(*words: str) -> Any:
    return grpo._parse_config(*grpo.parse_script(words))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(f"{text}\noutput_dir: {tmp_path}/out\n")
        return str(tmp_path / name)

    return write


def test_a_file_s_settings_are_those_of_flags(write: Any) -> None:
    file = write("""
model: owner/model
dataset: problems.jsonl
reward-funcs: [rewards:a, rewards:b]
reward_weights: [-1.0, 2]
live_table: true
vllm_devices: [2, 3]
num-vllm-gpus: 2
learning_rate: 3e-6
entropy_coef: -0.5
mask_truncated_completions: true
shuffle_dataset: false
generation_kwargs: {presence_penalty: 0.5, bad_words: ["--x"]}
eval_dataset: null
""")
    script, rest = grpo.parse_script(["--config", file])
    assert (script.model, script.dataset, script.reward_funcs) == (
        "owner/model",
        "problems.jsonl",
        ["rewards:a", "rewards:b"],
    )
    assert script.live_table
    assert script.eval_dataset is None
    config = grpo._parse_config(script, rest)
    assert config.reward_weights == [-1.0, 2.0]
    assert config.vllm_devices == [2, 3]
    assert config.num_vllm_gpus == 2
    assert config.learning_rate == 3e-6  # a text in YAML 1.1
    assert config.entropy_coef == -0.5
    assert config.mask_truncated_completions
    assert not config.shuffle_dataset
    assert config.generation_kwargs == {"presence_penalty": 0.5, "bad_words": ["--x"]}


def test_flags_win_over_the_file_wherever_they_stand(write: Any) -> None:
    file = write("model: a/b\nreward_funcs: [rewards:a]\nbeta: 0.1\nnum_generations: 4\nlive_table: false")
    for words in (["--beta", "0.2", "--config", file], ["--config", file, "--beta=0.2"]):
        script, rest = grpo.parse_script([*words, "--reward-funcs", "rewards:c", "rewards:d"])
        config = grpo._parse_config(script, rest)
        assert (config.beta, config.num_generations) == (0.2, 4)
        assert script.reward_funcs == ["rewards:c", "rewards:d"]
        assert not script.live_table


def test_null_is_none_and_not_the_default(write: Any) -> None:
    file = write("model: a/b\nvllm_importance_sampling_clip_max: null\nvllm_importance_sampling_clip_min: 0.5")
    assert parsed("--config", file).vllm_importance_sampling_clip_max is None
    assert parsed("--config", file, "--vllm-importance-sampling-clip-max", "2").vllm_importance_sampling_clip_max == 2.0


def test_no_is_a_strategy_and_not_false(write: Any) -> None:
    """As in every configuration of transformers; YAML 1.1 reads the bare word as false."""
    file = write("model: a/b\neval_strategy: no\nsave-strategy: no\nlogging_strategy: 'no'")
    config = parsed("--config", file)
    assert (config.eval_strategy, config.save_strategy, config.logging_strategy) == ("no", "no", "no")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("los_type: grpo", ["--los_type", "Did you mean --loss_type?"]),
        ("los_type: null", ["--los_type", "Did you mean --loss_type?"]),
        ("beta: high", ["--beta", "high"]),
        ("num_generations: null", ["num_generations is null", "Remove the line"]),
        ("temperature:", ["temperature is null"]),
        ("loss_type: nonsense", ["loss_type='nonsense'"]),
        ("config: other.yaml", ["names another file"]),
        ("generation_kwargs: [1]", ["generation_kwargs"]),
        ("beta: [0.1", ["no valid YAML", "line"]),
        ("!!python/object/apply:os.getcwd []: 1", ["no valid YAML"]),
    ],
)
def test_a_file_that_cannot_be_used(write: Any, text: str, words: list[str]) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        parsed("--model", "a/b", "--config", file)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "beta\n", "", "1: 2\n"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="one mapping of names to values"):
        parsed("--config", str(tmp_path / "run.yaml"))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes("beta: 0.1".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"run\.yaml' is no text in UTF-8"):
        parsed("--config", str(tmp_path / "run.yaml"))


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--config", "nowhere.yaml"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "colocate_rl: error: --config 'nowhere.yaml' could not be read: No such file or directory.\n"
    )


# Recipes

RECIPE_SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "mask_truncated_completions": True,
        "scale_rewards": "group",
    },
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0, "epsilon_high": 0.2},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "steps_per_generation": 16,
        "gradient_accumulation_steps": 4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "beta": 0.0},
    "lora": {"learning_rate": 1e-5, "model_init_kwargs": {"dtype": "bfloat16"}},
}


def test_every_recipe_is_tried() -> None:
    assert {file.stem for file in RECIPES.iterdir()} == set(RECIPE_SETTINGS)


@pytest.mark.parametrize("name", RECIPE_SETTINGS)
def test_a_recipe_says_what_its_paper_says_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its settings through the parser, then two steps of the same settings on a model of this machine's size."""
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())
    small = {
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "max_completion_length": 32,
        "max_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "vllm_logprob_gap_limit": 0,
        "output_dir": tmp_path,
        "disable_tqdm": True,
    }
    file = str(RECIPES / f"{name}.yaml")
    recipe = parsed("--model", "owner/model", "--output_dir", str(tmp_path), "--config", file)
    for setting, value in RECIPE_SETTINGS[name].items():
        assert getattr(recipe, setting) == value, setting
    flags = [f"--{setting}={value}" for setting, value in small.items()]
    script, rest = grpo.parse_script(["--model", "owner/model", "--config", file, *flags])
    adapter = peft_flags.lora_config(script)
    assert (adapter is not None) is (name == "lora")
    args = grpo._parse_config(script, rest)
    prompts = datasets.Dataset.from_dict({"prompt": [f"{number}=" for number in range(40)]})
    trainer = GRPOTrainer(tiny_model(), even_ids, args, prompts, processing_class=tiny_tokenizer(), peft_config=adapter)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert len(lines) == 2
    assert all(line["grad_norm"] > 0 for line in (lines[:1] if name == "gspo" else lines))
    assert all(line["grad_norm"] < 1e4 for line in lines), "0 is right for GSPO, which may clip a whole second update"
