"""Tool calls out of a completion's tokens, and the tokens with which a tool's answer goes on from there.

Nothing that was sampled is ever tokenised again: a dialogue only grows at its end.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate_rl.errors import ConfigError
from colocate_rl.rollout.tools import ToolCall, ToolResult

Message = dict[str, Any]

_MARK = "c0f3a91b"
"""Stands in a rendered tool call where nothing else can."""
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolFormat:
    """How one tokenizer's chat template writes what tools answer.

    Args:
        tokenizer: of the policy.
        schemas: of the tools.
        end_token_ids: that end a turn.
        template_kwargs: passed to ``apply_chat_template``.

    Raises:
        ConfigError: when the template leaves out tools, calls or answers, or does not end a turn with an end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[Mapping[str, Any]],
        end_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(end_token_ids)
        texts = [re.escape(str(tokenizer.convert_ids_to_tokens(token))) for token in end_token_ids]
        self._end_text = re.compile("|".join(texts))
        self._kwargs = {"tools": list(schemas), **(template_kwargs or {})}
        self._check(schemas)

    def suffix(self, results: Sequence[ToolResult]) -> tuple[int, ...]:
        """Ids that follow a completion which ended its turn: the tools' messages, and the opening of the next turn.

        They are cut out of a short dialogue that is rendered as a whole, behind the end token of its calling turn, so
        it does not matter what the template makes of earlier turns.

        Args:
            results: of the turn's calls, in order.
        """
        dialogue = _dialogue(results)
        text = str(self._render(dialogue, tokenize=False))
        ids: list[int] = list(self._render(dialogue, tokenize=True, return_dict=True)["input_ids"])
        called = text.find(_MARK)
        if called < 0:
            raise ConfigError(f"The chat template of {self._named()} leaves out the arguments of tool calls.")
        ends = [found.end() for found in self._end_text.finditer(text)]
        places = [place for place, token in enumerate(ids) if token in self._ends]
        turn = next((number for number, end in enumerate(ends) if end > called), None)
        if turn is None or len(places) != len(ends):
            raise ConfigError(
                f"The chat template of {self._named()} does not end a turn that calls a tool with one of the tokens "
                f"{self._end_text.pattern}, which end a completion. Set tokenizer.chat_template to one that does, or "
                "the model's generation_config.eos_token_id to what ends its turns."
            )
        return tuple(ids[places[turn] + 1 :])

    def _render(self, messages: list[Message], **how: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, **self._kwargs, **how)

    def _named(self) -> str:
        return type(self._tokenizer).__name__

    def _check(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"tools need a chat template, and {self._named()} has none. Use a chat model's tokenizer, or set "
                "tokenizer.chat_template."
            )
        name = str(schemas[0]["function"]["name"])
        try:
            asked = str(self._render([{"role": "user", "content": "?"}], tokenize=False))
            answer = self._tokenizer.decode(list(self.suffix([ToolResult(name, "5e2d7c90")])))
        except ConfigError:
            raise
        except Exception as error:  # jinja2's errors, and Python's from within a template
            raise ConfigError(
                f"The chat template of {self._named()} cannot write a tool call and its answer: {error}. Set "
                "tokenizer.chat_template to one that can."
            ) from error
        silent = [s["function"]["name"] for s in schemas if s["function"]["name"] not in asked]
        if silent or "5e2d7c90" not in str(answer):
            left_out = f"the tools {', '.join(silent)}" if silent else "what tools answer"
            raise ConfigError(
                f"The chat template of {self._named()} leaves out {left_out}, so the model would never see it. Set "
                "tokenizer.chat_template to one made for tools."
            )


def _dialogue(results: Sequence[ToolResult]) -> list[Message]:
    calls = [{"type": "function", "function": {"name": r.name, "arguments": {"mark": _MARK}}} for r in results]
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *[result.message() for result in results],
    ]


def known_ids(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[int]:
    """The ids that the tokenizer has words for: a model may have more embeddings, and samples them too."""
    size = len(tokenizer)
    return [token for token in token_ids if 0 <= token < size]


def parse(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    prompt_ids: Sequence[int],
    schemas: Sequence[Mapping[str, Any]] = (),
) -> Message:
    """The assistant's message that a completion is.

    By the tokenizer's own ``response_template`` where it has one; else calls are read in the form of Hermes and Qwen,
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A malformed call is text, as in TRL.

    Args:
        tokenizer: of the policy.
        token_ids: sampled ids; those beyond the tokenizer's range become nothing.
        prompt_ids: before them: templates may have opened the message already.
        schemas: of the tools, by which arguments get their types.

    Returns:
        ``role`` and ``content``, and ``tool_calls`` where there are any.
    """
    known = known_ids(tokenizer, token_ids)
    plain = {"role": "assistant", "content": str(tokenizer.decode(known, skip_special_tokens=True))}
    try:
        if getattr(tokenizer, "response_template", None) is not None:
            tools: Any = list(schemas) or None
            parsed: Any = tokenizer.parse_response(known, prefix=list(prompt_ids), tools=tools)
            content = str(parsed.get("content") or "").removesuffix(str(tokenizer.eos_token))
            return {**parsed, "role": "assistant", "content": content, **_checked_calls(parsed)}
        return _hermes(str(tokenizer.decode(known)), plain)
    except (ValueError, TypeError, AttributeError):
        return plain


def _hermes(text: str, plain: Message) -> Message:
    found = [json.loads(body) for body in _CALL.findall(text)]
    if not found:
        return plain
    calls = [{"type": "function", "function": body} for body in found]
    content = _CALL.sub("", str(plain["content"])).strip()
    return {**plain, "content": content, **_checked_calls({"tool_calls": calls})}


def _checked_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The calls with all that templates and tools read of them.

    Raises:
        ValueError: for a call without a name, or with arguments that are no object.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        name, arguments = function.get("name"), function.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"no call: {function}")  # noqa: TRY004  # one kind of error for all that is malformed
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return {"tool_calls": calls} if calls else {}


def calls_of(message: Message) -> list[ToolCall]:
    """The calls that a message asks for."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [ToolCall(function["name"], function["arguments"]) for function in functions]
