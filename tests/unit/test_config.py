"""`GRPOConfig`: what is refused and how, what is filled in, and that the command line reaches every setting."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from colocate_rl import GRPOConfig, options, values
from colocate_rl.errors import ConfigError
from colocate_rl.options import GRPOOptions, option_fields
from colocate_rl.rollout.advantages import group_advantages
from colocate_rl.training.aggregation import AGGREGATIONS
from colocate_rl.training.ratios import sampling_correction

pytestmark = pytest.mark.unit


class TwoRanks(GRPOConfig):
    """The configuration as one rank of a launch of two sees it."""

    @property
    def world_size(self) -> int:
        return 2


class TwoVisibleGpus(GRPOConfig):
    """The configuration in one process that sees two GPUs, as TrainingArguments finds them."""

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        device: torch.device = super()._setup_devices
        self._n_gpu = 2
        return device


def make(folder: Path, kind: type[GRPOConfig] = GRPOConfig, **changes: Any) -> GRPOConfig:
    return kind(output_dir=str(folder), **changes)


# Defaults


def test_defaults_work_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert config.bf16 is torch.cuda.is_available()
    assert config.n_gpu <= 1
    assert config.report_to == []
    assert config.remove_unused_columns is False
    assert config.learning_rate == 1e-6
    assert config.num_generations == config.num_generations_eval == 8
    assert config.epsilon_high == config.epsilon == 0.2
    assert config.generation_batch_size == config.per_device_train_batch_size
    assert config.beta == 0.0
    assert config.loss_type == "dapo"
    assert config.importance_sampling_level == "token"
    assert config.scale_rewards == "group"
    assert config.vllm_importance_sampling_mode == "sequence_mask"
    assert config.use_bias_correction_kl is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_nothing_needs_use_cpu(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert config.device == torch.device("cpu")
    assert config.bf16 is False
    assert config.gradient_checkpointing is False


def test_spare_gpus_do_not_make_data_parallel(tmp_path: Path) -> None:
    """B5: the GPUs beside the first belong to engines; the batch of the one process does not double."""
    config = make(tmp_path, TwoVisibleGpus)
    assert config.n_gpu == 1
    assert config.train_batch_size == config.per_device_train_batch_size == 8


def test_chosen_values_are_kept(tmp_path: Path) -> None:
    config = make(tmp_path, epsilon=0.1, epsilon_high=0.3, num_generations_eval=1, use_cpu=True)
    assert (config.epsilon, config.epsilon_high, config.num_generations_eval) == (0.1, 0.3, 1)
    assert make(tmp_path, bf16=True, use_cpu=True).bf16 is True
    assert make(tmp_path, gradient_checkpointing=True).gradient_checkpointing is True
    assert make(tmp_path, epsilon=0.1).epsilon_high == 0.1


# Batch arithmetic


@pytest.mark.parametrize(
    ("kind", "given", "steps", "batch"),
    [
        (GRPOConfig, {}, 1, 8),
        (GRPOConfig, {"gradient_accumulation_steps": 4}, 4, 32),
        (GRPOConfig, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 2, 16),
        (GRPOConfig, {"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3, 24),
        (GRPOConfig, {"generation_batch_size": 48}, 6, 48),
        (GRPOConfig, {"per_device_train_batch_size": 3, "num_generations": 6, "gradient_accumulation_steps": 2}, 2, 6),
        (TwoRanks, {}, 1, 16),
        (TwoRanks, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 2, 8),
        (TwoRanks, {"generation_batch_size": 48}, 3, 48),
        (TwoRanks, {"per_device_train_batch_size": 1, "num_generations": 2}, 1, 2),
    ],
)
def test_batch_arithmetic(
    tmp_path: Path, kind: type[GRPOConfig], given: dict[str, int], steps: int, batch: int
) -> None:
    config = make(tmp_path, kind, **given)
    assert (config.steps_per_generation, config.generation_batch_size) == (steps, batch)
    ranks = config.world_size
    assert batch == config.per_device_train_batch_size * ranks * steps
    for iterations in (1, 3):
        again = make(tmp_path, kind, **given, num_iterations=iterations)
        assert again.micro_batches_per_rollout == steps * iterations


@pytest.mark.parametrize(
    "given", [{}, {"generation_batch_size": 48}, {"use_vllm": False, "gradient_accumulation_steps": 2}]
)
def test_a_copy_of_a_configuration(tmp_path: Path, given: dict[str, Any]) -> None:
    """What it settled for itself, such as both sizes of a generation batch, is what a copy is given."""
    config = make(tmp_path, **given)
    copy = dataclasses.replace(config, learning_rate=0.5)
    assert copy.learning_rate == 0.5
    assert copy.generation_batch_size == config.generation_batch_size
    again = GRPOConfig(**config.to_dict())
    assert (again.to_dict(), again.num_vllm_gpus) == (config.to_dict(), config.num_vllm_gpus)
    with pytest.raises(ConfigError, match="both set the size"):
        dataclasses.replace(config, per_device_train_batch_size=16)


@pytest.mark.parametrize("num_generations", [2, 4, 8])
def test_two_ranks_of_two_with_accumulation_two(tmp_path: Path, num_generations: int) -> None:
    """H1: 2 ranks x batch 2 x accumulation 2 hold 8 completions; accumulation counts once."""
    config = make(
        tmp_path,
        TwoRanks,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=num_generations,
    )
    assert config.generation_batch_size == 8


@pytest.mark.parametrize("num_generations", [3, 5, 16])
def test_groups_that_do_not_fit(tmp_path: Path, num_generations: int) -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            tmp_path,
            TwoRanks,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_generations=num_generations,
        )
    text = str(caught.value)
    assert "per_device_train_batch_size=2 x 2 rank(s) x steps_per_generation=2 = 8" in text
    assert f"num_generations={num_generations}" in text
    assert "valid num_generations here: 2, 4, 8" in text


def test_a_batch_of_one_completion_has_no_valid_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="valid num_generations here: none"):
        make(tmp_path, per_device_train_batch_size=1, num_generations=2)


def test_generation_batch_must_be_a_multiple_of_what_one_step_takes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, TwoRanks, generation_batch_size=24)
    assert "generation_batch_size=24 must be a multiple of" in str(caught.value)
    assert "per_device_train_batch_size=8 x 2 rank(s) = 16" in str(caught.value)


@pytest.mark.parametrize("size", [0, -16])
def test_generation_batch_must_be_positive(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=f"generation_batch_size={size}"):
        make(tmp_path, generation_batch_size=size)


def test_evaluation_groups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            tmp_path,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=6,
            num_generations_eval=4,
        )
    for words in ("per_device_eval_batch_size=6 x 1 rank(s) = 6", "num_generations_eval=4"):
        assert words in str(caught.value)
    make(tmp_path, per_device_eval_batch_size=6, num_generations_eval=4)  # no evaluation: no rule
    make(
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=6,
        num_generations_eval=1,
    )


# Refusals

REFUSALS: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_generations": 1}, ["num_generations is 1", "at least 2"]),
    ({"num_generations": 0}, ["num_generations is 0", "at least 2"]),
    ({"num_generations_eval": 0}, ["num_generations_eval is 0", "at least 1"]),
    (
        {"generation_batch_size": 24, "steps_per_generation": 2},
        ["generation_batch_size=24", "steps_per_generation=2", "Set one"],
    ),
    ({"steps_per_generation": 0}, ["steps_per_generation is 0"]),
    ({"num_iterations": 0}, ["num_iterations is 0"]),
    ({"reward_num_workers": -1}, ["reward_num_workers is -1", "at least 0"]),
    ({"reward_timeout_s": 0.0}, ["reward_timeout_s is 0.0", "above 0 seconds"]),
    ({"max_resample_tries": 0}, ["max_resample_tries is 0", "at least 1"]),
    ({"dynamic_sampling": True, "overlap": "one_step"}, ["dynamic_sampling=True", "overlap='one_step'"]),
    ({"max_completion_length": 0}, ["max_completion_length is 0"]),
    (
        {"max_completion_length": 64, "vllm_max_model_length": 64},
        ["vllm_max_model_length=64", "max_completion_length=64", "no room"],
    ),
    ({"temperature": 0.0}, ["temperature=0.0", "above 0"]),
    ({"logprob_chunk_size": 0}, ["logprob_chunk_size is 0"]),
    ({"max_tokens_per_micro_batch": 0}, ["max_tokens_per_micro_batch is 0", "at least 1 token"]),
    ({"vllm_gpu_memory_utilization": 0.0}, ["vllm_gpu_memory_utilization is 0.0", "above 0"]),
    ({"vllm_gpu_memory_utilization": 1.5}, ["vllm_gpu_memory_utilization is 1.5", "up to 1"]),
    (
        {"vllm_importance_sampling_clip_min": 3.0},
        ["vllm_importance_sampling_clip_min=3.0", "below vllm_importance_sampling_clip_max=3.0"],
    ),
    (
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        ["'token_truncate'", "both are None", "Set at least one"],
    ),
    ({"vllm_mode": "server"}, ["vllm_mode='server'", "num_vllm_gpus"]),
    ({"auto_find_batch_size": True}, ["auto_find_batch_size=True", "per_device_train_batch_size"]),
    ({"vllm_devices": "2;3"}, ["vllm_devices='2;3'", "'2,3'"]),
    ({"vllm_devices": "GPU-1"}, ["vllm_devices='GPU-1'"]),
    ({"vllm_devices": ""}, ["vllm_devices=''"]),
    ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size is 0", "at least 1"]),
    ({"per_device_train_batch_size": 0, "generation_batch_size": 8}, ["per_device_train_batch_size is 0"]),
    ({"per_device_train_batch_size": -8}, ["per_device_train_batch_size is -8"]),
    ({"per_device_eval_batch_size": 0}, ["per_device_eval_batch_size is 0"]),
    ({"seed": -1}, ["seed is -1", "2**32"]),
    ({"temperature": math.nan}, ["temperature is nan", "finite"]),
    ({"temperature": math.inf}, ["temperature is inf", "finite"]),
    ({"min_p": 2.0}, ["min_p is 2.0", "0 to 1"]),
    ({"min_p": math.nan}, ["min_p is nan"]),
    ({"repetition_penalty": 0.0}, ["repetition_penalty is 0.0", "above 0"]),
    ({"vllm_logprob_gap_limit": math.nan}, ["vllm_logprob_gap_limit is nan"]),
    ({"vllm_logprob_gap_limit": -1.0}, ["vllm_logprob_gap_limit is -1.0", "no check"]),
    ({"num_completions_to_print": -1}, ["num_completions_to_print is -1", "at least 0"]),
    ({"vllm_importance_sampling_clip_max": -1.0}, ["vllm_importance_sampling_clip_max is -1.0", "above 0"]),
    ({"vllm_importance_sampling_clip_max": math.nan}, ["vllm_importance_sampling_clip_max is nan"]),
    ({"vllm_importance_sampling_clip_min": -1.0}, ["vllm_importance_sampling_clip_min is -1.0", "at least 0"]),
    ({"epsilon": "0.2"}, ["epsilon='0.2' is a text", "without quotes"]),
    ({"num_vllm_gpus": "2"}, ["num_vllm_gpus='2' is a text"]),
    ({"log_completions": "true"}, ["log_completions='true' is a text"]),
    ({"generation_kwargs": [1]}, ["generation_kwargs=[1] is no JSON object"]),
]


def test_one_device_may_be_a_plain_number(tmp_path: Path) -> None:
    assert make(tmp_path, vllm_devices=3).vllm_devices == [3]


@pytest.mark.parametrize(("given", "words"), REFUSALS, ids=lambda value: str(value)[:50])
def test_refusals_name_the_setting_and_the_numbers(tmp_path: Path, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "literal"), values.CHOICES.items(), ids=values.CHOICES)
def test_unknown_choices_list_the_known_ones(tmp_path: Path, name: str, literal: Any) -> None:
    known = options.choices(literal)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **{name: "nonsense"})
    assert f"{name}='nonsense' is unknown. Use one of: {', '.join(known)}." in str(caught.value)
    for value in known:
        others = {"vllm_importance_sampling_mode": "token_mask"} if value == "vespo" else {}
        assert getattr(make(tmp_path, **{name: value, **others}), name) == value


def test_choices_are_what_the_code_knows() -> None:
    """A choice without code behind it, or code without a choice, shows here."""
    assert options.choices(options.LossType) == tuple(AGGREGATIONS)
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 9.0]])
    results = [group_advantages(rewards, scale).advantages.tolist() for scale in options.choices(options.ScaleRewards)]
    assert all(a != b for i, a in enumerate(results) for b in results[:i])
    old, mask = torch.tensor([[1.0, -1.0, 0.5]]), torch.ones(1, 3, dtype=torch.bool)
    weights = [
        sampling_correction(old, torch.zeros(1, 3), mask, mode=mode, clip_max=1.2, clip_min=0.9).tolist()
        for mode in options.choices(options.SamplingCorrectionMode)
    ]
    assert all(a != b for i, a in enumerate(weights) for b in weights[:i])


def test_deepspeed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DeepSpeed and FSDP are not supported yet"):
        make(tmp_path, fsdp="full_shard")


# Spellings


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "group"),
        (False, "none"),
        ("True", "group"),
        ("false", "none"),
        ("batch", "batch"),
        ("group", "group"),
    ],
)
def test_scale_rewards_takes_trl_s_booleans(tmp_path: Path, value: Any, expected: str) -> None:
    assert make(tmp_path, scale_rewards=value).scale_rewards == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2,3", [2, 3]), ("2", [2]), (" 3 , 2 ", [3, 2]), ([1, 0], [1, 0]), (None, None)],
)
def test_vllm_devices_as_text(tmp_path: Path, value: Any, expected: list[int] | None) -> None:
    assert make(tmp_path, vllm_devices=value).vllm_devices == expected


@pytest.mark.parametrize("name", options.JSON_OPTIONS)
def test_json_options_as_text(tmp_path: Path, name: str) -> None:
    assert getattr(make(tmp_path, **{name: '{"a": [1, "x"]}'}), name) == {"a": [1, "x"]}
    assert getattr(make(tmp_path, **{name: {"a": 1}}), name) == {"a": 1}


@pytest.mark.parametrize("name", options.JSON_OPTIONS)
@pytest.mark.parametrize("text", ["[1]", "3", '"x"', "a=1"])
def test_json_options_must_be_dictionaries(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make(tmp_path, **{name: text})


# The command line

ROUND_TRIP: dict[str, tuple[list[str], Any]] = {
    "num_vllm_gpus": (["3"], 3),
    "vllm_devices": (["2,3"], [2, 3]),
    "vllm_tensor_parallel_size": (["2"], 2),
    "vllm_gpu_memory_utilization": (["0.4"], 0.4),
    "vllm_max_model_length": (["2048"], 2048),
    "vllm_max_num_seqs": (["7"], 7),
    "vllm_dtype": (["float16"], "float16"),
    "vllm_enforce_eager": (["True"], True),
    "vllm_per_request_seeds": (["True"], True),
    "vllm_engine_kwargs": (['{"block_size": 32}'], {"block_size": 32}),
    "vllm_logprob_gap_limit": (["0.5"], 0.5),
    "lora_sync": (["merged"], "merged"),
    "overlap": (["one_step"], "one_step"),
    "max_staleness": (["2"], 2),
    "use_vllm": (["False"], False),
    "vllm_model_impl": (["transformers"], "transformers"),
    "vllm_structured_outputs_regex": (["[0-9]+"], "[0-9]+"),
    "cache_implementation": (["static", "--use_vllm", "False"], "static"),
    "max_tool_calling_iterations": (["3"], 3),
    "use_transformers_continuous_batching": (["False"], False),
    "use_transformers_paged": (["False"], False),
    "vllm_mode": (["colocate"], "colocate"),
    "model_init_kwargs": (['{"revision": "main"}'], {"revision": "main"}),
    "trust_remote_code": (["True"], True),
    "cast_lm_head_to_fp32": (["True"], True),
    "disable_dropout": (["True"], True),
    "remove_unused_columns": (["True"], True),
    "shuffle_dataset": (["False"], False),
    "chat_template_kwargs": (['{"thinking": false}'], {"thinking": False}),
    "num_generations": (["4"], 4),
    "num_generations_eval": (["1"], 1),
    "max_completion_length": (["33"], 33),
    "generation_batch_size": (["16"], 16),
    "steps_per_generation": (["2"], 2),
    "temperature": (["0.7"], 0.7),
    "top_p": (["0.9"], 0.9),
    "top_k": (["5"], 5),
    "min_p": (["0.1"], 0.1),
    "repetition_penalty": (["1.1"], 1.1),
    "generation_kwargs": (['{"presence_penalty": 0.5}'], {"presence_penalty": 0.5}),
    "beta": (["0.04"], 0.04),
    "num_iterations": (["2"], 2),
    "epsilon": (["0.1"], 0.1),
    "epsilon_high": (["0.28"], 0.28),
    "delta": (["4.0"], 4.0),
    "importance_sampling_level": (["sequence"], "sequence"),
    "loss_type": (["bnpo"], "bnpo"),
    "sapo_temperature_pos": (["0.9"], 0.9),
    "sapo_temperature_neg": (["1.2"], 1.2),
    "vespo_k_pos": (["1.5"], 1.5),
    "vespo_lambda_pos": (["2.5"], 2.5),
    "vespo_k_neg": (["2.5"], 2.5),
    "vespo_lambda_neg": (["1.5"], 1.5),
    "multi_objective_aggregation": (["normalize_then_sum"], "normalize_then_sum"),
    "sync_ref_model": (["True", "--beta", "0.1"], True),
    "ref_model_mixup_alpha": (["0.5"], 0.5),
    "ref_model_sync_steps": (["64"], 64),
    "top_entropy_quantile": (["0.2"], 0.2),
    "entropy_coef": (["0.01"], 0.01),
    "use_adaptive_entropy": (["True"], True),
    "entropy_coef_min": (["-0.5"], -0.5),
    "entropy_coef_max": (["0.5"], 0.5),
    "entropy_coef_delta": (["0.001"], 0.001),
    "entropy_target": (["0.6"], 0.6),
    "router_aux_loss_coef": (["0.01"], 0.01),
    "off_policy_mask_threshold": (["0.5"], 0.5),
    "vllm_importance_sampling_cap": (["2.5"], 2.5),
    "use_liger_loss": (["True"], True),
    "scale_rewards": (["False"], "none"),
    "reward_weights": (["0.5", "2.0"], [0.5, 2.0]),
    "reward_num_workers": (["3"], 3),
    "reward_timeout_s": (["2.5"], 2.5),
    "on_reward_error": (["none"], "none"),
    "dynamic_sampling": (["True"], True),
    "max_resample_tries": (["5"], 5),
    "mask_truncated_completions": (["True"], True),
    "use_bias_correction_kl": (["False"], False),
    "old_logprobs": (["sampling"], "sampling"),
    "vllm_importance_sampling_correction": (["False"], False),
    "vllm_importance_sampling_mode": (["token_mask"], "token_mask"),
    "vllm_importance_sampling_clip_max": (["2.0"], 2.0),
    "vllm_importance_sampling_clip_min": (["0.5"], 0.5),
    "logprob_chunk_size": (["64"], 64),
    "padding_free": (["True"], True),
    "compile_layers": (["False"], False),
    "max_tokens_per_micro_batch": (["4096"], 4096),
    "log_completions": (["True"], True),
    "log_timeline": (["True"], True),
    "num_completions_to_print": (["0"], 0),
    "log_unique_prompts": (["True"], True),
    "log_reward_trace": (["True"], True),
    "learning_rate": (["1e-5"], 1e-5),
    "logging_steps": (["1"], 1),
    "gradient_checkpointing": (["True"], True),
    "bf16": (["True"], True),
}


@pytest.fixture(scope="module")
def parser() -> HfArgumentParser:
    return HfArgumentParser(GRPOConfig, allow_abbrev=False)  # type: ignore[arg-type]


def test_every_option_is_tried_on_the_command_line() -> None:
    assert set(ROUND_TRIP) == {item.name for item in option_fields()}


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_option_from_the_command_line(tmp_path: Path, parser: HfArgumentParser, name: str) -> None:
    words, expected = ROUND_TRIP[name]
    arguments = ["--output_dir", str(tmp_path), f"--{name}", *words]
    (config,) = parser.parse_args_into_dataclasses(args=arguments)
    value = getattr(config, name)
    assert value == expected
    assert type(value) is type(expected) or name == "logging_steps"
    (plain,) = parser.parse_args_into_dataclasses(args=["--output_dir", str(tmp_path)])
    if name not in ("vllm_mode", "use_transformers_continuous_batching", "use_transformers_paged"):
        assert getattr(plain, name) != expected, "a value that is the default would prove nothing"


def test_every_option_has_help_and_its_own_default() -> None:
    own = {item.name: item for item in dataclasses.fields(GRPOOptions)}
    joined = {item.name: item for item in dataclasses.fields(GRPOConfig)}
    for name, item in own.items():
        assert len(item.metadata["help"]) > 10, name
        assert joined[name].default == item.default, f"{name}: TrainingArguments hides our default"


def test_config_survives_a_checkpoint(tmp_path: Path) -> None:
    """Trainer writes the settings to each checkpoint and to trackers: they must be plain values."""
    config = make(tmp_path, vllm_devices="1,0", generation_kwargs='{"a": 1}', num_vllm_gpus=2)
    written = config.to_dict()
    assert written["vllm_devices"] == [1, 0]
    assert written["generation_kwargs"] == {"a": 1}
    assert '"num_vllm_gpus": 2' in config.to_json_string()


@pytest.mark.parametrize("name", [name for name, kind in GRPOOptions.__annotations__.items() if kind == bool | None])
def test_a_truth_value_that_may_be_left_open_is_a_flag_too(tmp_path: Path, name: str) -> None:
    """TRL's scripts are started with --use_vllm and --gradient_checkpointing, nothing behind them."""
    for words, expected in (([], True), (["true"], True), (["False"], False)):
        parser = HfArgumentParser(GRPOOptions)
        (parsed,) = parser.parse_args_into_dataclasses([f"--{name}", *words])
        assert getattr(parsed, name) is expected
    (parsed,) = HfArgumentParser(GRPOOptions).parse_args_into_dataclasses([])
    assert getattr(parsed, name) is None
