"""Tables, plots and a page from a run's figures: what a person looks at during and after training.

Everything is read from the files in a run's output folder, and survives figures that are missing or None. Who calls it:
``--live_table``, ``colocate-rl report RUN_DIR``, the end of a run, the demo, notebooks.
"""

from colocate_rl.report.figures import EngineShare, engine_shares, load_metrics, series
from colocate_rl.report.live import LiveTable
from colocate_rl.report.page import PAGE_FILE, write_page
from colocate_rl.report.plots import PLOT_FILE, plot_run
from colocate_rl.report.samples import Sample, read_samples
from colocate_rl.report.tables import engine_table, run_table

__all__ = [
    "PAGE_FILE",
    "PLOT_FILE",
    "EngineShare",
    "LiveTable",
    "Sample",
    "engine_shares",
    "engine_table",
    "load_metrics",
    "plot_run",
    "read_samples",
    "run_table",
    "series",
    "write_page",
]
