"""The contract with reward functions: what they get, what they may return, and how a breach is reported."""

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colocate_rl import rewards
from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring.contract import RewardFunction, RewardOptions, reward_name
from colocate_rl.scoring.names import resolve_reward

pytestmark = pytest.mark.unit


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def returning(values: Any, name: str = "broken") -> RewardFunction:
    """A reward function that returns ``values`` whatever it is given."""

    def function(**kwargs: Any) -> Any:
        return values

    function.__name__ = name
    return function


def score(
    functions: Sequence[RewardFunction],
    *,
    rows: int = 3,
    columns: Mapping[str, list[Any]] | None = None,
    options: RewardOptions | None = None,
    **helpers: Any,
) -> torch.Tensor:
    return Rewards(functions, options=options).score(
        [f"prompt {row}" for row in range(rows)],
        ["x" * row for row in range(rows)],
        [[row] for row in range(rows)],
        columns or {},
        **helpers,
    )


# What functions get and give


def test_functions_are_called_with_keywords_only() -> None:
    seen: list[dict[str, Any]] = []

    def spy(**kwargs: Any) -> list[float]:
        seen.append(kwargs)
        return [0.0, 0.0]

    state, log_extra, log_metric = object(), object(), object()
    score(
        [spy],
        rows=2,
        columns={"answer": ["3", "4"]},
        trainer_state=state,
        log_extra=log_extra,
        log_metric=log_metric,
    )
    assert seen == [
        {
            "prompts": ["prompt 0", "prompt 1"],
            "completions": ["", "x"],
            "completion_ids": [[0], [1]],
            "answer": ["3", "4"],
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
    ]


def test_one_column_per_function_in_order() -> None:
    table = score([length, returning([5.0, 6.0, 7.0])])
    assert table.dtype == torch.float32
    assert table.tolist() == [[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]]


def test_none_becomes_nan_for_that_row_and_function_alone() -> None:
    table = score([length, returning([1.0, None, 2.0])])
    assert math.isnan(table[1, 1])
    assert table.isnan().sum() == 1


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        (1.0, 2.0, 3.0),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([1, 2, 3], dtype=torch.int64),
        np.array([1.0, 2.0, 3.0]),
        [torch.tensor(1.0), np.float32(2.0), 3],
    ],
    ids=lambda value: type(value).__name__,
)
def test_lists_tuples_tensors_and_arrays_of_numbers_are_fine(values: Any) -> None:
    assert score([returning(values)]).tolist() == [[1.0], [2.0], [3.0]]


def test_booleans_count_as_numbers() -> None:
    assert score([returning([True, False, True])]).tolist() == [[1.0], [0.0], [1.0]]


def test_without_completions_no_function_is_called() -> None:
    def never(**kwargs: Any) -> list[float]:
        raise AssertionError("called for nothing")

    assert score([never, length], rows=0).shape == (0, 2)


def test_an_error_inside_a_function_is_its_own_and_names_the_function() -> None:
    def failing(**kwargs: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer") as caught:
        score([failing])
    assert caught.value.__notes__ == ["It was raised by the reward function 'failing'."]


def test_an_error_that_shall_cost_rewards_only(caplog: pytest.LogCaptureFixture) -> None:
    def failing(**kwargs: Any) -> list[float]:
        raise KeyError("answer")

    figures: list[tuple[str, float]] = []
    table = score(
        [failing, length], options=RewardOptions(on_error="none"), log_metric=lambda *pair: figures.append(pair)
    )
    assert table.isnan().tolist() == [[True, False]] * 3
    assert figures == [("reward_errors/failing", 1.0), ("reward_errors/length", 0.0)]
    assert caplog.text.count("WARNING") == 1
    assert "'failing' gave no reward for 3 of 3 completions" in caplog.text
    assert "KeyError: 'answer'" in caplog.text
    with pytest.raises(RewardError, match="returned 1 value"):  # a breach of the contract is no accident
        score([returning([1.0])], options=RewardOptions(on_error="none"))


def test_completions_that_no_function_scored_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    score([returning([1.0, None, 2.0]), returning([None, 1.0, None])], columns={"answer": ["a", "b", "c"]})
    assert not caplog.records
    score([returning([1.0, None, None]), returning([None, 1.0, None])], columns={"answer": ["a", "b", "c"]})
    assert "returned None for 1 of 3 completions" in caplog.text
    assert "'prompt 2', completion 'xx', {'answer': 'c'}" in caplog.text


def test_a_limit_needs_something_that_can_be_ended() -> None:
    with pytest.raises(ConfigError, match=r"reward_timeout_s=2 .*'length'.* reward_num_workers"):
        Rewards([length], options=RewardOptions(timeout_s=2.0))


# Breaches of the contract (G1)


@pytest.mark.parametrize(("values", "count"), [([1.0], 1), ([1.0, 2.0], 2), ([1.0] * 4, 4), ([], 0)])
def test_a_wrong_number_of_values_is_never_broadcast(values: list[float], count: int) -> None:
    with pytest.raises(RewardError) as caught:
        score([length, returning(values, "correct")])
    assert f"'correct' returned {count} value(s) for 3 completions" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (None, "NoneType"),
        ("abc", "str"),
        (b"abc", "bytes"),
        (1.0, "float"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "dict"),
        ((value for value in (1.0, 2.0, 3.0)), "generator"),
        (torch.tensor(1.0), "float"),
        (np.array(1.0), "float"),
    ],
)
def test_what_is_no_list(values: Any, kind: str) -> None:
    with pytest.raises(RewardError) as caught:
        score([returning(values, "correct")])
    assert f"'correct' returned {kind} instead of a list" in str(caught.value)
    assert "3 completions" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [torch.ones(3, 1), np.ones((3, 1)).tolist(), ["1", "x", "2"], [1.0, [2.0], 3.0], [1.0, {}, 3.0]],
    ids=["tensor of 3 x 1", "list of lists", "words", "one list", "one dict"],
)
def test_entries_that_are_no_numbers(values: Any) -> None:
    with pytest.raises(RewardError, match=r"'correct' returned .* for row \d .*not a number"):
        score([returning(values, "correct")])


def test_an_array_of_rows_is_refused_too() -> None:
    with pytest.raises(RewardError, match="not a number"):
        score([returning(np.ones((3, 2)), "correct")])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_names_function_row_and_value(value: float) -> None:
    with pytest.raises(RewardError) as caught:
        score([length, returning([0.0, 1.0, value], "correct")])
    text = str(caught.value)
    assert f"'correct' returned {value} for row 2" in text
    assert "return None" in text


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400], ids=["1e39", "-1e39", "10**400"])
def test_a_number_beyond_float32_is_refused_too(value: float) -> None:
    """As float32 it would be infinite, and its group would learn nothing without a word."""
    with pytest.raises(RewardError, match=r"'correct' returned -?(1e\+39|inf) for row 2 .*not finite \(in float32\)"):
        score([length, returning([0.0, 1.0, value], "correct")])


# Names, weights


class Judge:
    """A reward function with a state."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]


def test_names() -> None:
    assert reward_name(length) == "length"
    assert reward_name(functools.partial(functools.partial(length), scale=2)) == "length"
    assert reward_name(Judge()) == "Judge"
    assert reward_name(functools.partial(Judge())) == "Judge"


def test_repeated_names_are_numbered() -> None:
    assert Rewards([length, Judge(), length, length]).names == [
        "length",
        "Judge",
        "length_2",
        "length_3",
    ]


def test_a_partial_is_called_with_its_own_keywords() -> None:
    def scaled(completions: list[str], scale: float, **kwargs: Any) -> list[float]:
        return [scale * len(text) for text in completions]

    assert score([functools.partial(scaled, scale=3.0)]).tolist() == [[0.0], [3.0], [6.0]]


def test_weights() -> None:
    assert Rewards([length, Judge()]).weights.tolist() == [1.0, 1.0]
    assert Rewards([length, Judge()], [0.5, 2]).weights.tolist() == [0.5, 2.0]
    with pytest.raises(ConfigError, match=r"reward_weights has 1 value.* 2 reward function"):
        Rewards([length, Judge()], [1.0])


def test_the_caller_s_list_is_left_alone() -> None:
    functions: list[RewardFunction] = [length]
    Rewards(functions).functions.append(Judge())
    assert functions == [length]


def test_no_reward_and_no_callable() -> None:
    with pytest.raises(ConfigError, match="No reward source provided"):
        Rewards([])
    with pytest.raises(ConfigError, match=r"holds 7 of type int"):
        Rewards([length, 7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"of type Linear; it takes functions, reward models of transformers"):
        Rewards([torch.nn.Linear(1, 1)])


# From a name on the command line


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, as a user has it."""
    name = f"rewards_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "def correct(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
        "class Nested:\n    @staticmethod\n    def inner(completions, **kwargs):\n        return []\n"
        "NUMBER = 3\n"
        "def _private():\n    pass\n"
    )
    (tmp_path / f"{name}_lost.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


def test_a_reward_from_the_working_directory(reward_module: str) -> None:
    function = resolve_reward(f"{reward_module}:correct")
    assert list(function(completions=["a", "b"])) == [1.0, 1.0]
    assert reward_name(resolve_reward(f"{reward_module}:Nested.inner")) == "inner"


@pytest.mark.parametrize("path", ["rewards:", ":correct", "", "correct", "(x=1)"])
def test_a_name_of_another_form(path: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form package\.module:function.*accuracy_reward"):
        resolve_reward(path)


def test_dotted_names_as_in_trl(reward_module: str) -> None:
    assert list(resolve_reward(f"{reward_module}.correct")(completions=["a"])) == [1.0]
    with pytest.raises(ConfigError, match="has no function 'correkt'"):
        resolve_reward(f"{reward_module}.correkt")


@pytest.mark.parametrize("prefix", ["", "colocate_rl.rewards.", "trl.rewards."])
def test_ready_rewards_by_name(prefix: str) -> None:
    assert resolve_reward(f"{prefix}think_format_reward") is rewards.think_format_reward
    made = resolve_reward(f"{prefix}get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)")
    assert made == rewards.get_soft_overlong_punishment(100, 20)
    assert reward_name(made) == "soft_overlong_punishment_reward"


def test_a_maker_without_its_call_says_how_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"get_soft_overlong_punishment\(max_completion_len: int, soft_punish_cache"):
        resolve_reward("get_soft_overlong_punishment")
    with pytest.raises(ConfigError, match=r"missing a required argument: 'soft_punish_cache'"):
        resolve_reward("get_soft_overlong_punishment(max_completion_len=3)")
    with pytest.raises(ConfigError, match=r"soft_punish_cache=9 .* max_completion_len=3"):
        resolve_reward("get_soft_overlong_punishment(max_completion_len=3, soft_punish_cache=9)")
    with pytest.raises(ConfigError, match="made list, which cannot be called"):
        resolve_reward("think_format_reward(completions=['x'])")


@pytest.mark.parametrize("call", ["(3)", "(ngram_size=)", "(ngram_size=print(1))", "(**{'ngram_size': 3})", "(a=1"])
def test_a_call_is_read_and_never_executed(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no call with named plain values"):
        resolve_reward(f"get_repetition_penalty_reward{call}")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["correkt", "NUMBER", "Nested.outer"])
def test_a_module_without_that_function_lists_what_it_has(reward_module: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_reward(f"{reward_module}:{name}")
    text = str(caught.value)
    assert f"has no function {name!r}" in text
    assert "correct" in text
    assert "_private" not in text


@pytest.mark.parametrize("module", ["no_such_module_here", "no_such_package_here.rewards"])
def test_a_missing_module(reward_module: str, module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_reward(f"{module}:correct")
    assert f"there is no module {module!r}" in str(caught.value)
    assert "--reward-funcs" in str(caught.value)


def test_a_missing_module_in_an_existing_package(reward_module: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no module 'json\.rewards'"):
        resolve_reward("json.rewards:correct")


def test_a_module_that_cannot_import_something_else_says_so_itself(reward_module: str) -> None:
    """Calling that "no such module" would send the user to the wrong place."""
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        resolve_reward(f"{reward_module}_lost:correct")
