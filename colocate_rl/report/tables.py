"""A run's figures as tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from colocate_rl.report.figures import EngineShare, Record, series


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
            percent(share.prompts, prompts),
            f"{share.tokens:,}",
            percent(share.tokens, tokens),
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


def percent(part: float, whole: float) -> str:
    """A share as text; a dash when there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
