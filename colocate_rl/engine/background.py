"""An engine in a child process of its rank, which goes on generating while the rank trains.

A generating thread would starve training of the interpreter lock; a whole engine in a process of its own does not. The
child maps the policy's weights (:mod:`colocate_rl.engine.shared_weights`), its errors reach the rank with their
traceback, and a child that dies or goes silent ends the rank's call.
"""

import atexit
import contextlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch

from colocate_rl.engine.child import KEY_VARIABLE, Failure
from colocate_rl.engine.protocol import AdapterLayer, Completion, Request, SamplingSpec, Span, Work
from colocate_rl.engine.shared_weights import SharedWeights
from colocate_rl.errors import EngineError, WeightSyncError
from colocate_rl.lifeline import child_environment

SILENCE_S = 45.0
"""Seconds without a sign of life after which a child counts as hanging."""
START_S = 120.0
"""Seconds a child may take to import and connect."""
BUFFER_VALUES = 1 << 27
"""Least size of the buffer on a GPU through which changed weights go to the child: 256 MiB of 16 bits."""


class BackgroundEngine:
    """The same engine behind a pipe.

    Args:
        spec: an ``EngineSpec``; the child builds a ``VllmEngine`` from it.
        silence_s: see :data:`SILENCE_S`.

    Raises:
        EngineError: with the child's traceback, when it cannot be built.
    """

    def __init__(self, spec: Any, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._folder = tempfile.TemporaryDirectory(prefix="colocate_rl_child_")
        self._spec = spec
        self._shared: dict[str, SharedWeights] = {}
        self._buffer: torch.Tensor | None = None
        self._buffer_values = 0
        self._pending = False
        self._parts: list[tuple[int, list[Completion]]] = []
        self._span: Span | None = None
        self._silent_s = 0.0
        self._process: subprocess.Popen[bytes] | None
        self._process, self._pipe = self._start()
        atexit.register(self.close)
        try:
            self._call("build", spec)
        except BaseException:
            self.close()
            raise

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection[Any, Any]]":
        address, key = str(Path(self._folder.name) / "pipe"), secrets.token_bytes(32)
        environment = {**child_environment(), KEY_VARIABLE: key.hex()}
        with Listener(address, family="AF_UNIX", authkey=key) as listener:
            process = subprocess.Popen([sys.executable, "-m", "colocate_rl.engine.child", address], env=environment)
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # the public accept() waits for ever
            deadline = time.monotonic() + START_S
            while True:
                try:
                    return process, listener.accept()
                except TimeoutError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        process.kill()
                        raise EngineError(
                            f"the engine's process did not start (status {process.poll()}); its output is above."
                        ) from None
                except BaseException:
                    process.kill()
                    raise

    def begin(self, work: Work, sampling: SamplingSpec) -> None:
        """Starts generating and returns at once; :meth:`finish` waits for the answers."""
        self._send("generate", work, sampling)
        self._pending = True

    def poll(self, timeout_s: float) -> list[tuple[int, list[Completion]]]:
        """See :meth:`colocate_rl.engine.protocol.Background.poll`; errors of the child are raised here too."""
        deadline = time.monotonic() + timeout_s
        while self._pending and self._span is None:
            kind, value = self._receive(0.0 if self._parts else max(deadline - time.monotonic(), 0.0))
            if kind == "done":
                self._span = value
            elif kind is None:
                break
        return self._taken()

    def finish(self) -> tuple[list[tuple[int, list[Completion]]], Span]:
        """See :meth:`colocate_rl.engine.protocol.Background.finish`."""
        if self._span is None:
            if not self._pending:
                raise EngineError("the engine is asked for nothing, or has failed: there is nothing to wait for.")
            self._span = self._result()
        self._pending = False
        span, self._span = self._span, None
        return self._taken(), span

    def generate(self, requests: Sequence[Request], sampling: SamplingSpec) -> list[list[Completion]]:
        """See :meth:`colocate_rl.engine.protocol.Engine.generate`."""
        self.begin(Work.of(requests), sampling)
        answers = dict(self.finish()[0])
        return [answers[position] for position in range(len(requests))]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.load_weights`; the child copies while this call waits."""
        named = list(weights)
        sizes = [tensor.numel() for _, tensor in named]
        total = sum(sizes)  # on the CPU a part is loaded as a whole
        self._buffer_values = total if self._spec.device is None else min(total, max(*sizes, BUFFER_VALUES))
        self._share("weights", named)
        self._call("load")
        if self._spec.device is not None and not named[0][1].is_cuda:  # copies made for this call, not the policy's own
            self._shared.pop("weights").close()
            self._call("release", "weights")

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`colocate_rl.engine.protocol.LoraEngine.update_weights`.

        The tensors are rounded to the engine's type and gathered in a buffer that the child maps; whenever it is full,
        the child copies while this call waits.
        """
        parts: list[tuple[str, tuple[int, ...], int]] = []
        used = 0
        for name, tensor in weights:
            buffer = self._buffer_on(tensor.device)
            if used + tensor.numel() > buffer.numel():
                self._send_parts(parts)
                parts, used = [], 0
            buffer[used : used + tensor.numel()].view(tensor.shape).copy_(tensor)
            parts.append((name, tuple(tensor.shape), used))
            used += tensor.numel()
        if parts:
            self._send_parts(parts)

    def load_adapter(self, layers: Sequence[AdapterLayer], flat: torch.Tensor) -> None:
        """See :meth:`colocate_rl.engine.protocol.LoraEngine.load_adapter`; the child copies while this call waits."""
        self._share("adapter", [("adapter", flat)])
        self._call("adapt", tuple(layers))

    def _share(self, what: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Makes the current values of these tensors visible to the child, which maps them once."""
        shared = self._shared.get(what)
        if shared is None or not shared.still_covers(named):
            if shared is not None:
                shared.close()
            shared = self._shared[what] = SharedWeights(named)
            self._call("share", what, shared.manifest)
            shared.hide()
        shared.publish(named)

    def _buffer_on(self, device: torch.device) -> torch.Tensor:
        """The buffer of :meth:`update_weights`, on the device of the policy."""
        if self._buffer_values == 0:
            raise WeightSyncError("A part of the weights was sent before all of them.")
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(self._buffer_values, dtype=getattr(torch, self._spec.dtype), device=device)
        return self._buffer

    def _send_parts(self, parts: Sequence[tuple[str, tuple[int, ...], int]]) -> None:
        assert self._buffer is not None
        self._share("buffer", [("buffer", self._buffer)])
        self._call("update", tuple(parts))

    def reseed(self, seed: int) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.reseed`."""
        self._call("reseed", seed)

    def close(self) -> None:
        """See :meth:`colocate_rl.engine.protocol.Engine.close`."""
        if self._process is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(("close", ()))
        try:
            self._process.wait(0.1 if self._pending else 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._pipe.close()
        for shared in self._shared.values():
            shared.close()
        self._folder.cleanup()

    def _taken(self) -> list[tuple[int, list[Completion]]]:
        parts, self._parts = self._parts, []
        return parts

    def _call(self, name: str, *arguments: Any) -> Any:
        self._send(name, *arguments)
        return self._result()

    def _send(self, name: str, *arguments: Any) -> None:
        if self._process is None:
            raise EngineError("the engine is closed.")
        if self._pending:
            raise EngineError(f"the engine is generating; finish() comes before {name}.")
        self._parts, self._span, self._silent_s = [], None, 0.0
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise self._died() from error

    def _result(self) -> Any:
        """The answer to the last call; raises what the child raised, or says how it ended."""
        while True:
            kind, value = self._receive(1.0)
            if kind == "done":
                return value

    def _receive(self, timeout_s: float) -> tuple[str | None, Any]:
        """Takes one message, and keeps it if it is a part of an answer; None when none comes in time."""
        try:
            return self._message(timeout_s)
        except EngineError:
            self._pending = False
            raise
        except BaseException:  # an interrupt: the answer to come must never be taken for a later call's
            self._pending = False
            if self._process is not None:
                self._process.kill()
            raise

    def _message(self, timeout_s: float) -> tuple[str | None, Any]:
        assert self._process is not None
        try:
            if not self._pipe.poll(timeout_s):
                self._silent_s += timeout_s
                if self._silent_s > self._silence_s:
                    self._process.kill()
                    raise EngineError(
                        f"the engine's process {self._process.pid} gave no sign of life for {self._silence_s:.0f} s "
                        "and was ended."
                    )
                return None, None
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died() from error
        self._silent_s = 0.0
        if kind == "failed":
            assert isinstance(value, Failure)
            raise EngineError(f"{value.kind}: {value.text}\n\nIn the engine's process:\n{value.trace}")
        if kind == "part":
            self._parts.append(value)
        return kind, value

    def _died(self) -> EngineError:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.poll()
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return EngineError(f"the engine's process ended unasked ({how}); its own output is above.")
