"""Worker of test_wrong_launches.py: calls the command line several times on the same ranks (imports cost seconds)."""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from colocate_rl.grpo import main


def call(flags: list[str]) -> dict[str, object]:
    err = io.StringIO()
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
