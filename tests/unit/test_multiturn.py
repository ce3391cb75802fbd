"""Which tools, rollout functions and ways to generate go together; the rest is refused before a model is loaded."""

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import GenerationConfig

from colocate_rl import GRPOConfig, GRPOTrainer, backend, multiturn
from colocate_rl.errors import ConfigError, DataError
from colocate_rl.training import policy as policies
from tests.tiny import EOS, chat_tokenizer, save_tiny, tiny_tokenizer

pytestmark = pytest.mark.unit


def now() -> str:
    """Tells the time."""
    return "noon"


def nothing(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    raise AssertionError


def rewarded(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("given", "overlap", "words"),
    [
        ({"environment_factory": object}, "none", "Pass the environment's methods as tools, or run the"),
        ({"tools": [now], "rollout_func": nothing}, "none", "exclude each other"),
        ({"rollout_func": "module:function"}, "none", "must be a function, got str"),
        ({"rollout_func": nothing}, "one_step", "Set overlap='none'"),
        ({"tools": [3]}, "none", "cannot be described"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, given: dict[str, Any], overlap: str, words: str) -> None:
    args = GRPOConfig(str(tmp_path), overlap=overlap)
    with pytest.raises(ConfigError, match=words):
        multiturn.plan(args, *(given.get(name) for name in ("tools", "rollout_func", "environment_factory")))


def test_tools_may_run_one_batch_ahead_and_need_not_be(tmp_path: Path) -> None:
    plan = multiturn.plan(GRPOConfig(str(tmp_path), overlap="one_step"), [now], None, None)
    assert [schema["function"]["name"] for schema in plan.schemas] == ["now"]
    assert multiturn.plan(GRPOConfig(str(tmp_path)), [], None, None) == multiturn.Plan()


def construct(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, prompt: Any, ends: list[int] | None = None
) -> None:
    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    save_tiny(folder)
    if ends is not None:
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    monkeypatch.setattr(policies, "load_policy", loaded)
    GRPOTrainer(
        str(folder),
        rewarded,
        GRPOConfig(str(folder / "out"), use_cpu=True, per_device_train_batch_size=8, max_completion_length=4),
        datasets.Dataset.from_dict({"prompt": [prompt, prompt]}),
        processing_class=tokenizer,
        tools=[now],
    )


MESSAGES = [{"role": "user", "content": "?"}]


def test_tools_are_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="With tools a prompt must be a list of messages"):
        construct(tmp_path / "a", monkeypatch, chat_tokenizer(), "?")
    with pytest.raises(DataError, match="no chat template"):
        construct(tmp_path / "b", monkeypatch, tiny_tokenizer(), MESSAGES)
    deaf = chat_tokenizer()
    deaf.chat_template = deaf.chat_template.replace("{{ tool.function.name }};", "")
    with pytest.raises(ConfigError, match="leaves out the tools now"):
        construct(tmp_path / "c", monkeypatch, deaf, MESSAGES)
    with pytest.raises(AssertionError, match="a model was loaded"):
        construct(tmp_path / "d", monkeypatch, chat_tokenizer(), MESSAGES)


def test_the_end_of_a_turn_may_be_named_by_the_generation_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace(EOS, "<end>")
    with pytest.raises(ConfigError, match="does not end a turn"):
        construct(tmp_path, monkeypatch, tokenizer, MESSAGES)
    with pytest.raises(AssertionError, match="a model was loaded"):
        construct(tmp_path, monkeypatch, tokenizer, MESSAGES, ends=[256, 258])


# Structured outputs


def test_the_expression_wins_over_generation_kwargs(tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path),
        vllm_structured_outputs_regex="[ab]",
        generation_kwargs={"structured_outputs": {"regex": "c"}, "presence_penalty": 0.5},
    )
    assert backend.sampling_extra(args) == {"structured_outputs": {"regex": "[ab]"}, "presence_penalty": 0.5}
    assert backend.needs_tokenizer(args)
    plain = GRPOConfig(str(tmp_path), generation_kwargs={"presence_penalty": 0.5})
    assert not backend.needs_tokenizer(plain)
    assert backend.needs_tokenizer(GRPOConfig(str(tmp_path), generation_kwargs={"bad_words": ["x"]}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vllm_structured_outputs_regex": "(a"}, "is no regular expression: missing"),
        ({"generation_kwargs": {"stop": ["x"]}}, "generation_kwargs holds 'stop'"),
        ({"vllm_model_impl": "mine"}, "Use one of: vllm, transformers"),
        ({"max_tool_calling_iterations": 0}, "max_tool_calling_iterations is 0"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig(str(tmp_path), **given)


def test_a_correction_that_would_undo_the_expression_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "colocate_rl"):
        GRPOConfig(str(tmp_path), vllm_structured_outputs_regex="a", vllm_importance_sampling_correction=False)
        assert not caplog.records
        GRPOConfig(str(tmp_path), vllm_structured_outputs_regex="a")
    assert "vllm_structured_outputs_regex: the engine's log-probabilities include this filter" in caplog.text


def test_transformers_code_in_vllm_lives_in_a_child(tmp_path: Path) -> None:
    assert backend.needs_child(GRPOConfig(str(tmp_path), vllm_model_impl="transformers"))
    assert backend.needs_child(GRPOConfig(str(tmp_path), overlap="one_step"))
    assert not backend.needs_child(GRPOConfig(str(tmp_path)))
