"""The inside of a reward worker: a process that calls a rank's reward functions, so that it may hang or die instead.

Started by :mod:`colocate_rl.scoring.workers` as ``python -m colocate_rl.scoring.worker FD``; it imports nothing heavy
itself. It dies with its rank: the kernel kills it when the parent goes (Linux), and a closed pipe ends it everywhere.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from colocate_rl.lifeline import follow_rank


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned and logged."""

    values: Any
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns of ``log_extra``."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Figures of ``log_metric``."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """Why a call has no answer."""

    reason: str
    trace: str = ""
    """Of the worker, where the function raised."""


def main() -> None:
    """Serves the rank until the pipe closes."""
    follow_rank()
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def serve(pipe: "Connection[Any, Any]") -> None:
    """Takes the functions, then answers calls of them, each given by its number."""
    functions: list[Callable[..., Any]] = []

    def load(*pickled: bytes) -> None:
        functions.extend(pickle.loads(blob) for blob in pickled)

    def call(number: int, arguments: dict[str, Any]) -> Answer:
        return _call(functions[number], arguments)

    work: dict[str, Callable[..., Any]] = {"load": load, "call": call}
    while True:
        message = pipe.recv_bytes()
        try:
            name, arguments = pickle.loads(message)
            answer = pickle.dumps(work[name](*arguments))
        except (Exception, SystemExit) as error:
            answer = pickle.dumps(CallFailure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send_bytes(answer)


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Answer:
    extras: dict[str, list[Any]] = {}
    metrics: list[tuple[str, float]] = []
    expected = len(arguments["prompts"])

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != expected:
            raise ValueError(f"log_extra({column!r}) got {len(values)} value(s) for {expected} completions.")
        extras[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        metrics.append((name, float(value)))

    values = function(**arguments, log_extra=log_extra, log_metric=log_metric)
    return Answer(values.tolist() if hasattr(values, "tolist") else values, extras, metrics)


if __name__ == "__main__":
    from colocate_rl.scoring import worker  # under its own name, so that the rank can unpickle what it sends

    worker.main()
