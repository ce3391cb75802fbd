"""An interrupt while an engine's process generates; without an engine."""

import subprocess
import sys
from typing import Any

import pytest

from colocate_rl.engine.background import BackgroundEngine
from colocate_rl.engine.protocol import SamplingSpec, Work
from colocate_rl.errors import EngineError

pytestmark = pytest.mark.unit


class Interrupted:
    """A pipe at whose first wait the user presses Ctrl-C; nobody is at its other end afterwards."""

    def __init__(self) -> None:
        self._is_open = True

    def send(self, message: Any) -> None:
        if not self._is_open:
            raise BrokenPipeError

    def poll(self, timeout_s: float) -> bool:
        self._is_open = False
        raise KeyboardInterrupt

    def close(self) -> None: ...


def start(_: BackgroundEngine) -> tuple[subprocess.Popen[bytes], Any]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]), Interrupted()


def test_a_call_after_an_interrupt_says_that_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundEngine, "_start", start)
    monkeypatch.setattr(BackgroundEngine, "_call", lambda *_: None)
    engine = BackgroundEngine(None)
    engine.begin(Work.of([]), SamplingSpec(4))
    with pytest.raises(KeyboardInterrupt):
        engine.finish()
    with pytest.raises(EngineError, match="signal 9"):
        engine.begin(Work.of([]), SamplingSpec(4))
    engine.close()
