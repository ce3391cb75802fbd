"""One row per log on the terminal while a run goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from colocate_rl.report.figures import Record, engine_shares, number


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
    known = number(value)
    return form.format(known) if known is not None else "-"
