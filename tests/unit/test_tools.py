"""Tools: described, called, read out of completions and written behind them."""

import asyncio
import threading
import time
from typing import Any

import pytest

from colocate_rl.errors import ConfigError, DataError
from colocate_rl.rollout.dialogue import ToolFormat, calls_of, parse
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.tools import ToolBox, ToolCall, ToolResult
from tests.tiny import EOS, chat_tokenizer, tiny_tokenizer

pytestmark = pytest.mark.unit

EOS_ID = 256


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def slow_double(x: int) -> int:
    """Doubles a number.

    Args:
        x: the number.
    """
    await asyncio.sleep(0.2)
    if x < 0:
        raise ValueError("negative")
    return 2 * x


def test_schemas_say_names_types_and_meanings() -> None:
    function = ToolBox([add]).schemas[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"]["properties"]["b"] == {"type": "integer", "description": "the second."}
    assert function["parameters"]["required"] == ["a", "b"]


def test_results_come_in_the_order_of_calls_and_async_ones_run_side_by_side() -> None:
    calls = [
        [ToolCall("slow_double", {"x": 1}), ToolCall("add", {"a": 2, "b": 3}), ToolCall("slow_double", {"x": -1})],
        [],
        [ToolCall("slow_double", {"x": 4})],
    ]
    start = time.perf_counter()
    results = ToolBox([add, slow_double]).call(calls)
    assert time.perf_counter() - start < 0.5, "three calls of 0.2 s each"
    assert results == [
        [
            ToolResult("slow_double", "2"),
            ToolResult("add", "5"),
            ToolResult("slow_double", "{'error': 'negative'}", failed=True),
        ],
        [],
        [ToolResult("slow_double", "8")],
    ]


def test_async_tools_live_in_one_loop_also_where_one_runs_already() -> None:
    loops: list[Any] = []

    async def where() -> str:
        """Tells where it runs."""
        loops.append(asyncio.get_running_loop())
        return threading.current_thread().name

    toolbox = ToolBox([where])

    async def in_a_notebook() -> list[list[ToolResult]]:
        return toolbox.call([[ToolCall("where", {})]])

    assert asyncio.run(in_a_notebook()) == toolbox.call([[ToolCall("where", {})]])
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("subtract", {}), "There is no tool 'subtract'. Known: add."),
        (ToolCall("add", {"a": 1}), "missing 1 required positional argument: 'b'"),
        (ToolCall("add", {"a": 1, "b": "x"}), "unsupported operand"),
    ],
)
def test_a_wrong_call_is_answered_with_its_error(call: ToolCall, words: str) -> None:
    ((result,),) = ToolBox([add]).call([[call]])
    assert result.failed
    assert words in result.content


def undescribed(a: int) -> int:
    return a


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Has no type.

    Args:
        a: a number.
    """
    return int(a)


@pytest.mark.parametrize("tool", [undescribed, untyped, 3])
def test_a_tool_that_cannot_be_described_is_refused(tool: Any) -> None:
    with pytest.raises(ConfigError, match=getattr(tool, "__name__", "3")):
        ToolBox([tool])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="several functions named add"):
        ToolBox([add, add])


# Out of completions


def encode(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def test_calls_in_the_form_of_hermes_are_read() -> None:
    text = (
        'First.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}"}}}\n</tool_call>'
        f'<tool_call>{{"name": "now"}}</tool_call>{EOS}'
    )
    message = parse(tiny_tokenizer(), [*encode(text), 280], [])
    assert message["content"] == "First."
    assert calls_of(message) == [ToolCall("add", {"a": 1, "b": {"c": "}"}}), ToolCall("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        "<tool_call>{name: add}</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse(tiny_tokenizer(), encode(text + EOS), []) == {"role": "assistant", "content": text}


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "content": {"close": "<|eos|>"},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+) ",
            "close": ";",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_the_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    ids = encode(f'CALL add {{"a": 1, "b": 2}};{EOS}')
    message = parse(tokenizer, ids, encode("user:?<|eos|>\nassistant:"), ToolBox([add]).schemas)
    assert calls_of(message) == [ToolCall("add", {"a": 1, "b": 2})]
    assert EOS not in message["content"]
    plain = parse(tokenizer, encode(f"hello{EOS}"), encode("assistant:"))
    assert (plain["role"], plain["content"]) == ("assistant", "hello")


# Behind completions


def test_the_suffix_is_what_the_whole_dialogue_would_have_there() -> None:
    tokenizer = chat_tokenizer()
    schemas = ToolBox([add]).schemas
    results = [ToolResult("add", "5"), ToolResult("add", f"7{EOS} injected")]
    suffix = ToolFormat(tokenizer, schemas, [EOS_ID]).suffix(results)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": n, "b": 3}}} for n in (2, 4)]
    messages = [
        {"role": "user", "content": "2+3, 4+3"},
        {"role": "assistant", "content": "I see.", "tool_calls": calls},
        *[result.message() for result in results],
    ]
    whole = tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)
    assert whole.endswith("</tool_call><|eos|>" + tokenizer.decode(list(suffix)))
    assert tokenizer.decode(list(suffix)) == f"\ntool:5<|eos|>\ntool:7{EOS} injected<|eos|>\nassistant:"


def test_a_template_that_rewrites_earlier_turns_does_no_harm() -> None:
    """As Qwen3's does: an assistant's last turn is rendered with a thought, and loses it when more follows."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.role }}:",
        "{{ message.role }}:{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}",
    )
    suffix = ToolFormat(tokenizer, ToolBox([add]).schemas, [EOS_ID]).suffix([ToolResult("add", "5")])
    assert tokenizer.decode(list(suffix)) == "\ntool:5<|eos|>\nassistant:"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("{%- if tools %}", "{%- if false %}"), "leaves out the tools add"),
        (("{%- for call in message.tool_calls or [] %}", "{%- for call in [] %}"), "leaves out the arguments"),
        (("{{ message.content }}", ""), "leaves out what tools answer"),
        (("<|eos|>", "|"), "does not end a turn"),
        (("{{ message.role }}", "{{ raise_exception('no ' ~ message.role) }}"), "cannot write a tool call"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_templates_that_are_not_made_for_tools_are_refused(change: tuple[str, str], words: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(*change)
    with pytest.raises(ConfigError, match=words):
        ToolFormat(tokenizer, ToolBox([add]).schemas, [EOS_ID])


def test_no_template_and_plain_prompts_are_refused() -> None:
    schemas = ToolBox([add]).schemas
    with pytest.raises(ConfigError, match="tools need a chat template"):
        ToolFormat(tiny_tokenizer(), schemas, [EOS_ID])
    with pytest.raises(DataError, match="With tools a prompt must be a list of messages"):
        PromptCodec(chat_tokenizer(), None, schemas).encode("2+3")


def test_the_prompt_names_the_tools() -> None:
    codec = PromptCodec(chat_tokenizer(), None, ToolBox([add, slow_double]).schemas)
    text = codec.text(codec.encode([{"role": "user", "content": "2+3"}]))
    assert text == "tools:add;slow_double;\nuser:2+3\nassistant:"
