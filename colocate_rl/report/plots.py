"""The plot of a run: reward, and where the time of each step went; and what other plots share with it."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colocate_rl.report.figures import PHASES, Record, number, series

PLOT_FILE = "progress.png"


def plot_run(records: Sequence[Record], path: str | Path) -> None:
    """Draws reward, held-out reward and where the time of each step went.

    Args:
        records: of :func:`colocate_rl.report.load_metrics`.
        path: of the PNG to write; its folder is made if missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_reward(top, records)
    draw_phases(bottom, records)
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        tidy(axes)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def tidy(axes: Any) -> None:
    """Leaves of frame and grid what helps reading values."""
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_reward(axes: Any, records: Sequence[Record]) -> None:
    """Draws the reward of the rollouts, its running mean, and the held-out reward."""
    rewards, held_out = series(records, "reward"), series(records, "eval_reward")
    if rewards:
        steps, values = zip(*rewards, strict=True)
        window = max(1, len(values) // 15)
        colour = "#9ecae9" if window > 1 else "#4c78a8"  # pale behind a running mean
        axes.plot(steps, values, color=colour, linewidth=1, label="reward of each step's rollout")
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


def draw_phases(axes: Any, records: Sequence[Record], legend_columns: int = len(PHASES)) -> None:
    """Draws the seconds of each step, phase upon phase."""
    timed = [record for record in records if any(number(record.get(f"time/{name}_s")) is not None for name in PHASES)]
    axes.set_ylabel("seconds per step")
    axes.set_title("Where the time of a step goes", loc="left")
    if not timed:
        return
    steps = [int(record["step"]) for record in timed]
    width = statistics.median(b - a for a, b in itertools.pairwise(steps)) if len(steps) > 1 else 1
    heights = [0.0] * len(timed)
    for name, colour in PHASES.items():
        values = [number(record.get(f"time/{name}_s")) or 0.0 for record in timed]
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
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=legend_columns, fontsize=9, frameon=False)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    return [statistics.fmean(values[max(0, position - half) : position + half + 1]) for position in range(len(values))]
