"""Tools as functions: their schemas for the chat template, and calling them as completions ask."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from colocate_rl.errors import ConfigError

Tool = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a completion asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call."""

    name: str
    content: str
    """The tool's answer as text; of a failed call: ``{'error': reason}``."""
    failed: bool = False

    def message(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"role": "tool", "name": self.name, "content": self.content}


class ToolBox:
    """The tools of a run.

    Args:
        functions: with type hints and a docstring in Google's style that describes every argument; sync or async.

    Raises:
        ConfigError: for a function that cannot be described to a model, or two of one name.
    """

    def __init__(self, functions: Sequence[Tool]) -> None:
        self.schemas = [_schema(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"tools holds several functions named {', '.join(twice)}; a model could not choose.")
        self._functions = dict(zip(names, functions, strict=True))
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, calls: Sequence[Sequence[ToolCall]]) -> list[list[ToolResult]]:
        """Runs the calls of several completions: sync tools one after the other, then all async ones side by side.

        A tool that raises, or that does not exist, gives a result that says so: the model may do better next time.

        Returns:
            One result per call, in order.
        """
        results: list[list[Any]] = [[self._begin(call) for call in row] for row in calls]
        waiting = [(row, place) for row, r in enumerate(results) for place, x in enumerate(r) if inspect.isawaitable(x)]
        if waiting:
            found = self._wait([results[row][place] for row, place in waiting])
            for (row, place), value in zip(waiting, found, strict=True):
                results[row][place] = value
        return [
            [_result(call.name, value) for call, value in zip(row, values, strict=True)]
            for row, values in zip(calls, results, strict=True)
        ]

    def _begin(self, call: ToolCall) -> Any:
        """The tool's answer, its exception, or an awaitable of either."""
        function = self._functions.get(call.name)
        if function is None:
            return LookupError(f"There is no tool {call.name!r}. Known: {', '.join(self._functions)}.")
        try:
            return function(**call.arguments)
        except Exception as error:
            return error

    def _wait(self, awaitables: Sequence[Any]) -> list[Any]:
        """Runs awaitables in one loop that lives as long as the run, so that a tool may keep its connections."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="colocate_rl tools", daemon=True).start()

        async def together() -> list[Any]:
            return await asyncio.gather(*awaitables, return_exceptions=True)

        coroutine: Coroutine[Any, Any, list[Any]] = together()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _schema(function: Tool) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers' own, and whatever it stumbles over in something that is no function
        raise ConfigError(
            f"tools holds {getattr(function, '__name__', function)!r}, which cannot be described to a model: {error} A "
            "tool is a function with a type hint for every argument and a docstring (Google style) that says what it "
            "does and what every argument means."
        ) from error
    return schema


def _result(name: str, value: Any) -> ToolResult:
    if isinstance(value, Exception):
        return ToolResult(name, str({"error": str(value)}), failed=True)
    return ToolResult(name, str(value))
