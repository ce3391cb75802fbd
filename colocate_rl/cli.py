"""Console script ``colocate-rl``: names the sub-command and hands over."""

import sys

USAGE = """\
usage: colocate-rl {grpo,report} ...

  grpo    train with GRPO in this process; several ranks: accelerate launch --num_processes N-K -m colocate_rl.grpo ...
  report  colocate-rl report RUN_DIR: tables, a plot and a page (report.html) of a run
"""


def main() -> None:
    """Entry point of the console script."""
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "grpo":
        from colocate_rl.grpo import main as grpo

        grpo(rest)
    elif command == "report":
        from colocate_rl.report.command import main as report

        report(rest)
    else:
        print(USAGE, file=sys.stderr if command not in ("-h", "--help") else sys.stdout)
        raise SystemExit(0 if command in ("-h", "--help") else 2)
