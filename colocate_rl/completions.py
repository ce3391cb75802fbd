"""The completions of a logging window as a table: printed, and kept as parquet."""

import pickle
import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text


class CompletionLog:
    """Keeps the newest rows (one generation batch) between logs.

    Args:
        limit: rows kept.
        reward_names: one column each.
    """

    def __init__(self, limit: int, reward_names: Sequence[str]) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=limit)
        self._reward_names = list(reward_names)

    def add(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rewards: Sequence[Sequence[float]],
        advantages: Sequence[float],
        extras: Mapping[str, Sequence[Any]],
    ) -> None:
        """Adds rows; every argument has one entry per row (of ``rewards``: a list in the order of the names)."""
        for row, (prompt, completion, values, advantage) in enumerate(
            zip(prompts, completions, rewards, advantages, strict=True)
        ):
            record: dict[str, Any] = {"prompt": prompt, "completion": completion}
            record |= dict(zip(self._reward_names, values, strict=True))
            record |= {name: column[row] for name, column in extras.items()}
            self._rows.append({**record, "advantage": advantage})

    def clear(self) -> None:
        """Forgets the rows without writing them."""
        self._rows.clear()

    def flush(
        self, step: int, folder: Path, *, num_to_print: int | None, unique_prompts: bool, console: Console
    ) -> list[dict[str, Any]]:
        """Writes ``completions_<step>.parquet`` and prints a table of the rows, then forgets them.

        Args:
            step: optimizer step.
            folder: for the parquet file; made when missing.
            num_to_print: rows in the printed table, chosen at random; None: all, 0: none.
            unique_prompts: keep only the first row of each prompt.
            console: where to print.

        Returns:
            The rows written.
        """
        rows = [{"step": step, **row} for row in self._rows]
        self._rows.clear()
        if unique_prompts:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        if not rows:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        rows = self._write(rows, folder / f"completions_{step:05d}.parquet")
        if num_to_print != 0:
            shown = (
                rows
                if num_to_print is None or num_to_print >= len(rows)
                else random.Random(step).sample(rows, num_to_print)
            )
            console.print(self._table(step, shown))
        return rows

    def _write(self, rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
        """Writes a file with as many columns as any row has; its rows, of which extras may have become text."""
        columns = dict.fromkeys(name for row in rows for name in row)
        values = {name: [row.get(name) for row in rows] for name in columns}
        try:
            pq.write_table(pa.table(values), file)
        except Exception:  # whatever a reward function thought of as an extra: a log must not end a run
            values = {
                name: column if _is_plain(name, column) else list(map(_plain_text, column))
                for name, column in values.items()
            }
            pq.write_table(pa.table(values), file)
            return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return rows

    @staticmethod
    def _table(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
        table = Table(title=f"Step {step}", show_lines=True)
        names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))  # extras may be missing
        for name in names:
            table.add_column(name.capitalize(), overflow="fold")
        for row in rows:
            cells = [_cell(row.get(name, "")) for name in names]
            table.add_row(*[Text(cell) for cell in cells])
        return table


def _is_plain(name: str, column: Sequence[Any]) -> bool:
    """Whether a column surely is what parquet takes: of floats, by its values, as an extra may have a reward's name."""
    return name == "step" or all(value is None or isinstance(value, float) for value in column)


def _plain_text(value: Any) -> str:
    """As text that every encoding can hold: a string of Python's may have halves of characters."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def sendable(values: list[Any]) -> list[Any]:
    """An extra column as it goes to the rank that writes the table: as text, where a value cannot go there."""
    try:
        pickle.dumps(values)
    except Exception:  # whatever a class of the user's raises: a log must not end a run
        return [_plain_text(value) for value in values]
    return values


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
