"""Two ranks under torchrun, each of which writes what it found into ``rank<r>.json``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_two_ranks(module: str, out: Path, *, timeout_s: float = 400, **environment: str) -> list[dict[str, Any]]:
    """Runs ``python -m module OUT`` on two ranks; what each of them wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", module, str(out)],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
