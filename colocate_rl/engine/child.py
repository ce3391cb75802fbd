"""The engine side of an overlapped run: the same engine class in a process of its own, obeying one rank through a pipe.

Started by ``colocate_rl.engine.background`` as ``python -m colocate_rl.engine.child SOCKET``. It dies with its rank:
the kernel kills it when the parent goes (Linux), and a closed pipe ends it everywhere.
"""

import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

from colocate_rl.lifeline import follow_rank

KEY_VARIABLE = "COLOCATE_RL_ENGINE_KEY"
BEAT_S = 1.0
"""Seconds between two signs of life."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the child, as the rank raises it."""

    kind: str
    text: str
    trace: str


def main() -> None:
    """Connects to the rank and serves until it says close or goes away."""
    follow_rank()
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    pipe = Client(sys.argv[1], family="AF_UNIX", authkey=key)
    try:
        Server(pipe).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)


class Server:
    """Answers the rank's calls one by one; a thread sends signs of life meanwhile.

    Args:
        pipe: to the rank.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._outbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._engine: Any = None
        self._shared: dict[str, list[tuple[str, Any]]] = {}

    def serve(self) -> None:
        """Serves until close."""
        threading.Thread(target=self._post, daemon=True).start()
        calls: dict[str, Callable[..., Any]] = {
            "build": self._build,
            "share": self._share,
            "release": self._release,
            "load": lambda: self._engine.load_weights(self._shared["weights"]),
            "update": self._update,
            "adapt": lambda layers: self._engine.load_adapter(layers, self._shared["adapter"][0][1]),
            "generate": self._generate,
            "reseed": lambda seed: self._engine.reseed(seed),
        }
        while True:
            name, arguments = self._pipe.recv()
            if name == "close":
                if self._engine is not None:
                    self._engine.close()
                return
            try:
                self._send("done", calls[name](*arguments))
            except Exception as error:
                self._send("failed", Failure(type(error).__name__, str(error), traceback.format_exc()))

    def _send(self, kind: str, value: Any) -> None:
        self._outbox.put((kind, value))

    def _post(self) -> None:
        """Sends what is in the outbox, and a sign of life whenever nothing was for a while.

        A thread of its own, because a pipe that the rank does not empty makes the sender wait, and the engine must not.
        """
        while True:
            try:
                message = self._outbox.get(timeout=BEAT_S)
            except queue.Empty:
                message = ("alive", None)
            try:
                self._pipe.send(message)
            except OSError:
                os._exit(1)

    def _build(self, spec: Any) -> None:
        from colocate_rl.engine.vllm_engine import VllmEngine

        self._engine = VllmEngine(spec)

    def _share(self, what: str, manifest: Any) -> None:
        self._shared[what] = manifest.open()

    def _release(self, what: str) -> None:
        del self._shared[what]

    def _update(self, parts: Sequence[tuple[str, tuple[int, ...], int]]) -> None:
        """Takes over tensors that lie one behind another in the shared buffer."""
        buffer = self._shared["buffer"][0][1]
        self._engine.update_weights(
            (name, buffer[start : start + math.prod(shape)].view(shape)) for name, shape, start in parts
        )

    def _generate(self, work: Any, sampling: Any) -> Any:
        """Sends each request's completions as soon as they are there; the rank may be busy and not take them yet."""
        from colocate_rl.engine.protocol import Span

        start = time.monotonic()
        self._engine.work_off(work, sampling, lambda *answer: self._send("part", answer))
        return Span(start, time.monotonic())


if __name__ == "__main__":
    from colocate_rl.engine import child  # under its own name, so that what it sends can be unpickled by the rank

    child.main()
