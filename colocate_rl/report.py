"""Tables and plots from a run's figures: what a person looks at during and after training.

It reads ``metrics.jsonl`` (one object per log, written by the trainer) and survives figures that are missing or None.
Who calls it: ``--live_table``, ``colocate-rl report RUN_DIR``, the demo, notebooks.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colocate_rl.errors import DataError

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "progress.png"
PHASES = {"generate": "#4c78a8", "score": "#b279a2", "sync": "#e45756", "train": "#f2a541"}
"""Phases of a step, in the order they happen, and their colours in the plot."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one engine did over a run, evaluation not counted."""

    engine: int
    prompts: int
    tokens: int
    seconds: float
    """Time spent generating."""

    @property
    def tokens_per_s(self) -> float:
        """Speed while generating; 0 for an engine that never did."""
        return self.tokens / self.seconds if self.seconds else 0.0


def load_metrics(output_dir: str | Path) -> list[Record]:
    """Reads the figures of the run in ``output_dir``, in order of steps.

    A resumed run logs some steps a second time: the later record counts. A line cut short by a kill is left out.

    Raises:
        DataError: if there is no metrics file.
    """
    path = Path(output_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"There is no {METRICS_FILE} in {str(output_dir)!r}: is this the --output_dir of a run?")
    records: list[Record] = []
    for line in path.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "step" in record:
            _take(records, record)
    return records


def _take(records: list[Record], new: Record) -> None:
    """Appends a record in place of those of later steps, and of one of the same step and kind."""
    while records and records[-1]["step"] > new["step"]:
        records.pop()
    position = len(records)
    while position and records[position - 1]["step"] == new["step"]:
        position -= 1
        if records[position].keys() == new.keys():
            del records[position]
    records.append(new)


def engine_shares(records: Iterable[Record]) -> list[EngineShare]:
    """Sums what each engine did; an engine that only ever idled is listed with zeros."""
    sums: dict[int, dict[str, float]] = {}
    for record in records:
        for key, value in record.items():
            area, _, rest = key.partition("/")
            number, _, figure = rest.partition("/")
            if area == "engine" and number.isdigit():
                engine = sums.setdefault(int(number), {"prompts": 0.0, "tokens": 0.0, "generate_s": 0.0})
                if figure in engine:
                    engine[figure] += _number(value) or 0.0
    return [
        EngineShare(number, round(engine["prompts"]), round(engine["tokens"]), engine["generate_s"])
        for number, engine in sorted(sums.items())
    ]


def engine_table(shares: Sequence[EngineShare]) -> Table:
    """Lays the engines side by side, so that an idle one is visible at once."""
    table = Table(title="Work of each engine", title_justify="left")
    for heading in ("engine", "prompts", "share", "tokens", "share", "seconds", "tokens/s"):
        table.add_column(heading, justify="right")
    prompts, tokens = sum(share.prompts for share in shares), sum(share.tokens for share in shares)
    for share in shares:
        table.add_row(
            str(share.engine),
            f"{share.prompts:,}",
            _percent(share.prompts, prompts),
            f"{share.tokens:,}",
            _percent(share.tokens, tokens),
            f"{share.seconds:.1f}",
            f"{share.tokens_per_s:,.0f}",
            style="" if share.tokens else "bold red",
        )
    return table


def run_table(records: Sequence[Record]) -> Table:
    """Compares the first and the last figures of a run."""
    table = Table(title="Run", title_justify="left")
    for heading in ("figure", "first", "last"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    rows = {
        "step": "reward",
        "reward": "reward",
        "held-out reward": "eval_reward",
        "completion length": "completions/mean_length",
        "seconds per step": "step_time",
        "log-prob gap": "sampling/sampling_logp_difference/mean",
    }
    for heading, key in rows.items():
        points = series(records, key)
        if points and heading == "step":
            table.add_row(heading, str(points[0][0]), str(points[-1][0]))
        elif points:
            table.add_row(heading, f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}")
    return table


def series(records: Iterable[Record], key: str) -> list[tuple[int, float]]:
    """Every (step, value) at which ``key`` has a finite value."""
    points = ((record["step"], _number(record.get(key))) for record in records)
    return [(int(step), value) for step, value in points if value is not None]


def plot_run(records: Sequence[Record], path: str | Path) -> None:
    """Draws reward, held-out reward and where the time of each step went.

    Args:
        records: of :func:`load_metrics`.
        path: of the PNG to write; its folder is made if missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_reward(top, records)
    _draw_phases(bottom, records)
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def _draw_reward(axes: Any, records: Sequence[Record]) -> None:
    rewards, held_out = series(records, "reward"), series(records, "eval_reward")
    if rewards:
        steps, values = zip(*rewards, strict=True)
        window = max(1, len(values) // 15)
        axes.plot(steps, values, color="#9ecae9", linewidth=1, label="reward of each step's rollout")
        if window > 1:
            label = f"mean of {window} logs"
            axes.plot(steps, _running_mean(values, window), color="#4c78a8", linewidth=2, label=label)
    if held_out:
        steps, values = zip(*held_out, strict=True)
        style = {"color": "#d62728", "marker": "o", "markersize": 8, "linestyle": "--", "linewidth": 1}
        axes.plot(steps, values, label="held-out reward (not trained on)", zorder=3, clip_on=False, **style)
        for position, (step, value) in enumerate(held_out):
            if position in (0, len(held_out) - 1):
                axes.annotate(
                    f"{value:.3g}",
                    (step, value),
                    xytext=(8 if position == 0 else -8, -18),
                    textcoords="offset points",
                    color="#d62728",
                    fontweight="bold",
                    horizontalalignment="left" if position == 0 else "right",
                )
    drawn = [value for _, value in rewards + held_out]
    if drawn and 0 <= min(drawn) <= max(drawn) <= 1:
        axes.set_ylim(0, 1.03)
    axes.set_ylabel("reward")
    axes.set_title("Reward and held-out reward", loc="left")
    if drawn:
        axes.legend(loc="lower right", frameon=False)


def _draw_phases(axes: Any, records: Sequence[Record]) -> None:
    timed = [record for record in records if any(_number(record.get(f"time/{name}_s")) is not None for name in PHASES)]
    axes.set_ylabel("seconds per step")
    axes.set_title("Where the time of a step goes", loc="left")
    if not timed:
        return
    steps = [int(record["step"]) for record in timed]
    width = statistics.median(b - a for a, b in itertools.pairwise(steps)) if len(steps) > 1 else 1
    heights = [0.0] * len(timed)
    for name, colour in PHASES.items():
        values = [_number(record.get(f"time/{name}_s")) or 0.0 for record in timed]
        label = f"{name} (median {statistics.median(values):.2f} s)"
        axes.bar(steps, values, width=width, bottom=heights, color=colour, label=label)
        heights = [below + value for below, value in zip(heights, values, strict=True)]
    # The first steps compile kernels; drawn to scale, they would flatten all others.
    ranked = sorted(heights)
    usual = 1.15 * ranked[int(0.97 * (len(ranked) - 1))]
    if ranked[-1] > 2 * usual > 0:
        axes.set_ylim(0, usual)
        longest = heights.index(ranked[-1])
        note = f" (cut off: step {steps[longest]} took {heights[longest]:.1f} s)"
        axes.set_title(axes.get_title(loc="left") + note, loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=len(PHASES), fontsize=9, frameon=False)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    return [statistics.fmean(values[max(0, position - half) : position + half + 1]) for position in range(len(values))]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    key: str
    form: str


_COLUMNS = (
    _Column("step", "step", "{:.0f}"),
    _Column("reward", "reward", "{:.3f}"),
    _Column("std", "reward_std", "{:.3f}"),
    _Column("loss", "loss", "{:+.4f}"),
    _Column("length", "completions/mean_length", "{:.1f}"),
    _Column("logp gap", "sampling/sampling_logp_difference/mean", "{:.1e}"),
    _Column("gen s", "time/generate_s", "{:.2f}"),
    _Column("train s", "time/train_s", "{:.2f}"),
    _Column("sync s", "time/sync_s", "{:.2f}"),
)
_HEADER_EVERY = 30


class LiveTable:
    """A callback that prints one row per log on the first rank, in place of Trainer's dictionaries.

    It answers every event that ``transformers.TrainerCallback`` knows, without importing transformers. On a terminal
    the header comes again now and then; otherwise (a pipe, a file) it comes once and the rows are plain text.

    Args:
        console: where to print; None: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console()
        self._engines: list[int] = []
        self._num_rows = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Answers the events that this callback has nothing to say to."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Record | None = None, **kwargs: Any) -> None:
        """Prints the row of one log; an evaluation becomes a line of its own."""
        if not logs or not state.is_world_process_zero:
            return
        record = {"step": state.global_step, **logs}
        if "reward" in record:
            self._print_row(record)
        elif any(name.startswith("eval_") for name in record):
            self._print_evaluation(record)

    def _print_row(self, record: Record) -> None:
        engines = [share.engine for share in engine_shares([record])]
        again = self._console.is_terminal and self._num_rows % _HEADER_EVERY == 0
        if self._num_rows == 0 or again or engines != self._engines:
            self._engines = engines
            headings = [column.heading for column in _COLUMNS] + [f"tok/s {engine}" for engine in engines]
            self._print(_join(headings), "bold")
        self._num_rows += 1
        cells = [_cell(column.form, record.get(column.key)) for column in _COLUMNS]
        cells += [_cell("{:,.0f}", record.get(f"engine/{engine}/tokens_per_s")) for engine in engines]
        self._print(_join(cells))

    def _print_evaluation(self, record: Record) -> None:
        rewards = {
            name: value for name, value in record.items() if name.startswith("eval_") and name.endswith("reward")
        }
        for name, value in rewards.items():
            figure = "held-out reward" if name == "eval_reward" else name
            self._print(f"{record['step']:>8}  {figure} {_cell('{:.3f}', value)}", "bold green")

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Leaves Trainer's control object as it is."""


def _join(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>8}" for cell in cells)


def _cell(form: str, value: object) -> str:
    number = _number(value)
    return form.format(number) if number is not None else "-"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _number(value: object) -> float | None:
    """The value as a finite float, else None."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """``colocate-rl report RUN_DIR``: prints the tables of a run and draws its plot."""
    parser = argparse.ArgumentParser(prog="colocate-rl report", description="Tables and a plot of a finished run.")
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
