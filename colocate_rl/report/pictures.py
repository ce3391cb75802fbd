"""The curves of ``report.html``: one small SVG each, as the address of an ``<img>``."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colocate_rl.report.figures import PHASES, Record, series
from colocate_rl.report.plots import draw_phases, draw_reward, tidy

WIDTH, HEIGHT = 5.6, 3.2
"""Of a picture, in inches."""
PIXELS_PER_INCH = 96
COLOURS = ("#4c78a8", "#d62728", "#54a24b", "#b279a2", "#f2a541", "#439894", "#83bcb6", "#9d755d")


@dataclass(frozen=True, slots=True)
class Picture:
    """One curve or several, drawn."""

    title: str
    summary: str
    """What a reader who does not see the picture is told."""
    address: str
    """``data:`` URL of the SVG."""
    width: int = round(WIDTH * PIXELS_PER_INCH)
    height: int = round(HEIGHT * PIXELS_PER_INCH)


@dataclass(frozen=True, slots=True)
class _Curves:
    """What is drawn into one picture: keys of the records by their name in the legend."""

    title: str
    keys: dict[str, str]


_CURVES = (
    _Curves("Loss", {"loss": "loss", "held-out loss": "eval_loss"}),
    _Curves("KL divergence from the reference (nats per token)", {"kl": "kl"}),
    _Curves("Entropy of the policy (nats per token)", {"entropy": "entropy"}),
    _Curves("Standard deviation of rewards", {"within groups": "reward_std"}),
    _Curves("Groups whose rewards are all alike (share)", {"share": "frac_reward_zero_std"}),
    _Curves(
        "Completion length (tokens)",
        {"longest": "completions/max_length", "mean": "completions/mean_length", "shortest": "completions/min_length"},
    ),
    _Curves("Completions cut at their limit (share)", {"share": "completions/clipped_ratio"}),
    _Curves("Tokens whose ratio was clipped (share)", {"share": "clip_ratio/region_mean"}),
    _Curves("Norm of the gradient", {"norm": "grad_norm"}),
    _Curves("Learning rate", {"rate": "learning_rate"}),
    _Curves(
        "Gap between engine and policy (log-probability)",
        {
            "largest": "sampling/sampling_logp_difference/max",
            "mean": "sampling/sampling_logp_difference/mean",
        },
    ),
    _Curves("Staleness of completions (policy versions)", {"mean": "staleness"}),
    _Curves("Idle share of a step", {"training GPUs": "time/idle_train", "engines": "time/idle_generate"}),
)


def run_pictures(records: Sequence[Record]) -> list[Picture]:
    """Draws every curve that the records have figures for, the reward first."""
    import matplotlib as mpl

    # Names in a legend are a user's: no formulas in them. Text stays text, which is smaller than its outlines.
    with mpl.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "colocate_rl"}):
        return list(_pictures(records))


def _pictures(records: Sequence[Record]) -> Iterator[Picture]:
    if series(records, "reward") or series(records, "eval_reward"):
        yield _picture(lambda axes: draw_reward(axes, records), _summary(records, {"reward": "reward"}))
    timed = {name: f"time/{name}_s" for name in PHASES}
    if any(series(records, key) for key in timed.values()):
        yield _picture(lambda axes: draw_phases(axes, records, legend_columns=2), _summary(records, timed))
    for curves in (_each_reward(records), *_CURVES, _engine_speeds(records)):
        known = {name: key for name, key in curves.keys.items() if series(records, key)}
        if known:
            yield _picture(_lines(curves.title, records, known), _summary(records, known))


def _each_reward(records: Sequence[Record]) -> _Curves:
    names = dict.fromkeys(key for record in records for key in record if key.startswith("rewards/"))
    means = [name for name in names if name.endswith("/mean")]
    keys = {key.removeprefix("rewards/").removesuffix("/mean"): key for key in means}
    return _Curves("Reward of each function", keys if len(keys) > 1 else {})


def _engine_speeds(records: Sequence[Record]) -> _Curves:
    keys = sorted({key for record in records for key in record if key.startswith("engine/")})
    speeds = [key for key in keys if key.endswith("/tokens_per_s")]
    return _Curves("Tokens per second of each engine", {f"engine {key.split('/')[1]}": key for key in speeds})


def _lines(title: str, records: Sequence[Record], keys: dict[str, str]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        lines = []
        for place, key in enumerate(keys.values()):
            steps, values = zip(*series(records, key), strict=True)
            marker = "o" if len(values) < 10 else ""  # a single value has no line
            lines += axes.plot(steps, values, color=COLOURS[place % len(COLOURS)], linewidth=1.5, marker=marker)
        axes.set_title(title, loc="left")
        if len(keys) > 1:
            axes.legend(lines, list(keys), frameon=False, fontsize=9)

    return draw


def _picture(draw: Callable[[Any], None], summary: str) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    tidy(axes)
    axes.set_xlabel("optimizer step")
    title = axes.get_title(loc="left")
    axes.set_title("", loc="left")  # the page shows it
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return Picture(title, summary, "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode())


def _summary(records: Sequence[Record], keys: dict[str, str]) -> str:
    """First and last value of each curve, in words."""
    parts = []
    for name, key in keys.items():
        points = series(records, key)
        if points:
            (first, start), (last, end) = points[0], points[-1]
            parts.append(f"{name}: {start:.4g} at step {first}, {end:.4g} at step {last}")
    return "; ".join(parts)
