"""``colocate-rl report RUN_DIR``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from colocate_rl.errors import DataError
from colocate_rl.report.figures import engine_shares, load_metrics
from colocate_rl.report.page import write_page
from colocate_rl.report.plots import PLOT_FILE, plot_run
from colocate_rl.report.tables import engine_table, run_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of a run, draws its plot and writes its page."""
    parser = argparse.ArgumentParser(
        prog="colocate-rl report", description="Tables, a plot and a page (report.html) of a run, finished or not."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="The --output_dir of the run.")
    parser.add_argument("--plot", metavar="FILE", help=f"Where to draw the plot (default: RUN_DIR/{PLOT_FILE}).")
    given = parser.parse_args(arguments)
    try:
        records = load_metrics(given.run_dir)
    except DataError as error:
        sys.stderr.write(f"colocate_rl: error: {error}\n")
        raise SystemExit(1) from None
    console = Console()
    console.print(run_table(records))
    console.print(engine_table(engine_shares(records)))
    plot = Path(given.plot) if given.plot else Path(given.run_dir) / PLOT_FILE
    plot_run(records, plot)
    console.print(f"Plot: {plot}", soft_wrap=True)
    console.print(f"Page: {write_page(given.run_dir)}", soft_wrap=True)
