"""The demo on the GPUs it finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_the_demo_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.addition.demo", "--seed", "1", "--out", str(tmp_path / "demo")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "demo/summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.4
