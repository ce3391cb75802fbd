"""The engine side of an overlapped run: the same engine class in a process of its own, obeying one rank through a pipe.

Started by ``colocate_rl.engine.background`` as ``python -m colocate_rl.engine.child SOCKET``. It dies with its rank:
the kernel kills it when the parent goes (Linux), and a closed pipe ends it everywhere.
"""

import ctypes
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

KEY_VARIABLE = "COLOCATE_RL_ENGINE_KEY"
PARENT_VARIABLE = "COLOCATE_RL_ENGINE_PARENT"
BEAT_S = 1.0
"""Seconds between two signs of life."""
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the child, as the rank raises it."""

    kind: str
    text: str
    trace: str


def main() -> None:
    """Connects to the rank and serves until it says close or goes away."""
    _die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    pipe = Client(sys.argv[1], family="AF_UNIX", authkey=key)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides when a run is interrupted
    try:
        Server(pipe).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Server:
    """Answers the rank's calls one by one; a thread sends signs of life meanwhile.

    Args:
        pipe: to the rank.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._engine: Any = None
        self._shared: dict[str, list[tuple[str, Any]]] = {}

    def serve(self) -> None:
        """Serves until close."""
        threading.Thread(target=self._beat, daemon=True).start()
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
                self._send("done", None)
                return
            try:
                self._send("done", calls[name](*arguments))
            except Exception as error:
                self._send("failed", Failure(type(error).__name__, str(error), traceback.format_exc()))

    def _send(self, kind: str, value: Any) -> None:
        with self._lock:
            self._pipe.send((kind, value))

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._send("alive", None)
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

    def _generate(self, requests: Any, sampling: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        answers = self._engine.generate(requests, sampling)
        return answers, time.perf_counter() - start


if __name__ == "__main__":
    from colocate_rl.engine import child  # under its own name, so that what it sends can be unpickled by the rank

    child.main()
