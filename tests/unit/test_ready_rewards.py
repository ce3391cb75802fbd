"""The ready rewards against values worked out by hand."""

import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from colocate_rl import rewards
from colocate_rl.errors import ConfigError
from colocate_rl.scoring.contract import reward_name

pytestmark = pytest.mark.unit


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("form", [str, said])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\nwhy\n</think>\nbecause", 1.0),
        ("<think></think>", 1.0),
        ("<think>why</think>", 1.0),
        ("<think>a</think>b</think>c", 1.0),
        ("<think>why", 0.0),
        ("because", 0.0),
        ("", 0.0),
        (" <think>why</think>", 0.0),
        ("<think>a<think>b</think>", 0.0),
        ("<think>a</think><think>b</think>", 0.0),
    ],
)
def test_think_format(form: Any, text: str, value: float) -> None:
    assert rewards.think_format_reward([form(text)]) == [value]


@pytest.mark.parametrize(
    ("length", "value"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_soft_overlong_punishment(length: int, value: float) -> None:
    punish = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert punish(completion_ids=[[1] * length, [1]]) == [pytest.approx(value), 0.0]


def test_overlong_punishment_without_a_cache_is_a_cliff() -> None:
    punish = rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=0)
    assert punish(completion_ids=[[1] * 4, [1] * 5]) == [0.0, -1.0]
    with pytest.raises(ConfigError, match="soft_punish_cache=5"):
        rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=5)


@pytest.mark.parametrize(
    ("ids", "size", "value"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([5, 5, 5, 5, 5], 2, -0.75),  # 4 pairs, 3 of them seen before
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21
        ([1, 2, 1, 2, 1], 3, -1 / 3),  # 121 212 121
        ([7, 7], 1, -0.5),
        ([1, 2], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition_penalty(ids: list[int], size: int, value: float) -> None:
    assert rewards.get_repetition_penalty_reward(size, -1.0)(completion_ids=[ids]) == [pytest.approx(value)]
    assert rewards.get_repetition_penalty_reward(size, -2.0)(completion_ids=[ids]) == [pytest.approx(2 * value)]


@pytest.mark.parametrize("wrong", [{"ngram_size": 0}, {"max_penalty": 0.5}])
def test_a_penalty_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        rewards.get_repetition_penalty_reward(**wrong)


THIRD = r"$\frac{1}{3}$"
ANSWERS = [
    (r"so it is \boxed{\frac{1}{3}}", 1.0),
    (r"so it is \boxed{\frac{2}{6}}", 1.0),
    (r"so it is \boxed{\frac{1}{2}}", 0.0),
    ("one third", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize("form", [str, said])
def test_accuracy(form: Any) -> None:
    pytest.importorskip("math_verify")
    seen: dict[str, list[Any]] = {}
    values = rewards.accuracy_reward(
        [form(text) for text, _ in ANSWERS], [THIRD] * len(ANSWERS), log_extra=seen.__setitem__
    )
    assert values == [value for _, value in ANSWERS]
    assert seen["solution"] == [THIRD] * len(ANSWERS)
    assert "1/3" in seen["gold_parsed"][0]
    assert "1/2" in seen["answer_parsed"][2]
    assert seen["answer_parsed"][4] == "[]"


def test_accuracy_of_a_solution_that_says_nothing() -> None:
    pytest.importorskip("math_verify")
    assert rewards.accuracy_reward([r"\boxed{1}"] * 2, ["?", "$1$"]) == [None, 1.0]


def test_accuracy_after_the_reasoning() -> None:
    pytest.importorskip("math_verify")
    texts = [
        r"<think>\boxed{1}</think>\boxed{2}",
        r"<think>\boxed{2}</think>\boxed{1}",
        r"<think>\boxed{2}",
        r"<think>a</think>\boxed{1}</think>\boxed{2}",
    ]
    assert rewards.reasoning_accuracy_reward(texts, ["$2$"] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert rewards.reasoning_accuracy_reward([r"a END \boxed{2}"], ["$2$"], reasoning_delimiters=["END"]) == [1.0]


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [(0, 1.0, -1.0), (25, 0.75 + math.sqrt(2) / 8, -0.75 - math.sqrt(2) / 8), (50, 0.75, -0.75), (100, 0.5, -0.5)],
)
def test_cosine_scaled(length: int, right: float, wrong: float) -> None:
    pytest.importorskip("math_verify")
    reward = rewards.get_cosine_scaled_reward(max_len=100)
    ids = [[1] * length] * 3
    values = reward(
        completions=[r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"], solution=["$1$", "$1$", "?"], completion_ids=ids
    )
    assert values == [pytest.approx(right), pytest.approx(wrong), None]
    assert reward(completions=[r"\boxed{1}"], solution=["$1$"], completion_ids=[[1] * 300]) == [pytest.approx(0.5)]


MADE = {
    "soft_overlong_punishment_reward": rewards.get_soft_overlong_punishment(10, 5),
    "repetition_penalty_reward": rewards.get_repetition_penalty_reward(),
    "cosine_scaled_reward": rewards.get_cosine_scaled_reward(10),
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
}


@pytest.mark.parametrize("name", MADE)
def test_all_can_be_pickled_and_keep_their_name(name: str) -> None:
    again = pickle.loads(pickle.dumps(MADE[name]))
    assert again == MADE[name]
    assert reward_name(again) == name


def test_they_need_nothing_heavy_and_say_what_is_missing() -> None:
    code = """
import sys
sys.modules["math_verify"] = None
from colocate_rl import rewards
assert not {"torch", "transformers", "sympy"} & set(sys.modules), "heavy"
print(rewards.think_format_reward(["<think></think>"]))
try:
    rewards.accuracy_reward(["1"], ["1"])
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[1.0]" in done.stdout
    assert 'pip install "colocate-rl[math]"' in done.stdout
