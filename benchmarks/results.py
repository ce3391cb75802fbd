"""The table and the picture of compare_splits.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]
Cell = Callable[[Row], str]

PHASES = {"generate_s": "generate", "score_s": "score", "train_s": "train", "sync_s": "weight sync"}
COLOURS = {"generate_s": "#4477AA", "score_s": "#CCBB44", "train_s": "#228833", "sync_s": "#EE6677"}


def console_of(width: int) -> Console:
    """Where tables are printed: of the terminal's width, and of ``width`` where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def number(row: Row, name: str, form: str) -> str:
    """A figure of a row, or a dash where there is none."""
    value = row.get(name)
    return "-" if value is None else format(value, form)


def seconds(row: Row, name: str) -> str:
    """Seconds with three significant digits or so."""
    value = row.get(name)
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def share(row: Row, name: str) -> str:
    """A share as a percentage."""
    value = row.get(name)
    return "-" if value is None else f"{100 * value:.0f} %"


def peak_memory(row: Row) -> dict[str, float]:
    """Peak of each device in GiB: what the driver saw, else what torch reserved; on CPU, each rank's process."""
    memory = row.get("memory") or {}
    devices = memory.get("nvidia_smi_gib") or memory.get("torch_reserved_gib")
    if devices:
        return dict(devices)
    return {f"rank {rank}": value for rank, value in enumerate(memory.get("rss_gib", []))}


def memory_cell(row: Row) -> str:
    """One line per device."""
    peaks = peak_memory(row)
    names = {name: name if name.startswith("rank") else f"GPU {name}" for name in peaks}
    return "\n".join(f"{names[name]}: {value:.1f}" for name, value in peaks.items()) or "-"


LINES: Sequence[tuple[str, Cell]] = (
    ("step (s)", lambda row: seconds(row, "step_s")),
    ("  generate (s)", lambda row: seconds(row, "generate_s")),
    ("  score (s)", lambda row: seconds(row, "score_s")),
    ("  train (s)", lambda row: seconds(row, "train_s")),
    ("  weight sync (s)", lambda row: seconds(row, "sync_s")),
    ("sampled tokens/s while generating", lambda row: number(row, "tokens_per_s", ",.0f")),
    ("trained tokens/s while training", lambda row: number(row, "train_tokens_per_s", ",.0f")),
    ("training side idle", lambda row: share(row, "idle_train")),
    ("generating side idle", lambda row: share(row, "idle_generate")),
    ("busier side's share of the step", lambda row: share(row, "overlap_efficiency")),
    ("completions/s per device", lambda row: number(row, "samples_per_s_per_gpu", ".2f")),
    ("log-prob gap (nats)", lambda row: number(row, "logprob_gap", ".1e")),
    ("peak memory (GiB)", memory_cell),
)
SECTION_ENDS = (0, 4, 6, 9, 11)


def title(row: Row) -> str:
    """Column head of a row: system, split, overlap."""
    return split_title(row) + ("" if row["overlap"] == "none" else f"\n{row['overlap']}")


def split_title(row: Row) -> str:
    """System and split of a row."""
    if row["splits_devices"]:
        return f"{row['system']}\n{row['num_processes']} train + {row['num_vllm_gpus']} generate"
    where = "shared" if row["on_gpu"] else "on CPU"
    if row["system"] == "trl-server" and row["on_gpu"]:
        return f"{row['system']}\n{row['num_processes']} train + 1 generate"
    if row["system"] != "colocate_rl":
        return f"{row['system']}\n{row['num_devices']} GPUs"
    return f"{row['system']}\n{row['num_processes']} ranks, K={row['num_vllm_gpus']} {where}"


def make_table(rows: Sequence[Row], caption: str) -> Table:
    """One column per system and split, one line per figure."""
    table = Table(title="One optimizer step, medians of the counted steps", caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(title(row), justify="right", no_wrap=True)
    failed = [row for row in rows if row["error"] is not None]
    for place, (name, cell) in enumerate(LINES):
        cells = [
            cell(row) if row["error"] is None else f"failed [{failed.index(row) + 1}]" if place == 0 else ""
            for row in rows
        ]
        style = "bold" if place == 0 else ""
        table.add_row(name, *map(escape, cells), end_section=place in SECTION_ENDS, style=style)
    return table


def print_results(rows: Sequence[Row], caption: str, sentences: Sequence[str]) -> None:
    """Prints the table, what failed and why, and the advice."""
    console = console_of(max(100, 36 + 26 * len(rows)))
    console.print(make_table(rows, caption))
    errors = [row["error"] for row in rows if row["error"] is not None]
    for place, message in enumerate(errors):
        console.print(f"[{place + 1}] {message}", markup=False, highlight=False, soft_wrap=True)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def draw(rows: Sequence[Row], path: Path, subtitle: str) -> None:
    """Writes a PNG with one stacked bar per system and split that ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["error"] is None]
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.75 * max(1, len(shown))), layout="constrained")
    longest = max((row["step_s"] for row in shown), default=1.0)
    for place, row in enumerate(shown):
        start = 0.0
        for name, label in PHASES.items():
            value = row[name] or 0.0
            axes.barh(place, value, left=start, color=COLOURS[name], label=label if place == 0 else None, height=0.6)
            if value > 0.08 * longest:
                axes.text(start + value / 2, place, f"{value:.1f}" if value >= 1 else f"{value:.2g}", **INSIDE)
            start += value
        axes.text(start + 0.01 * longest, place, f"{seconds(row, 'step_s')} s", va="center", fontweight="bold")
    axes.set_yticks(range(len(shown)), [title(row) for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * longest)
    axes.set_xlabel("seconds per optimizer step (median)")
    axes.set_title(subtitle, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        figure.legend(loc="outside lower center", ncols=len(PHASES), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


INSIDE: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 9}
