"""Worker of test_wrong_launches.py: calls the command line several times on the same ranks (imports cost seconds)."""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from colocate_rl import engines
from colocate_rl.grpo import main

count_gpus = engines.count_gpus


def call(flags: list[str]) -> dict[str, object]:
    """One call; ``--gpus N`` in front lets the machine count N GPUs, so that placement is checked as there."""
    err = io.StringIO()
    engines.count_gpus = count_gpus
    if flags[0] == "--gpus":
        number = int(flags[1])
        engines.count_gpus = lambda args: number
        flags = flags[2:]
    start, status = time.monotonic(), 0
    try:
        with contextlib.redirect_stderr(err):
            main(flags)
    except SystemExit as stop:
        status = int(stop.code or 0)
    return {"status": status, "err": err.getvalue(), "seconds": time.monotonic() - start}


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = {name: call(flags) for name, flags in cases.items()}
    Path(f"result_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(results))
