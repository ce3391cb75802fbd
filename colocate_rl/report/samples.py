"""Completions that a run wrote down (``log_completions``), a few of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPLETIONS_FOLDER = "completions"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a completions table."""

    step: int
    prompt: str
    completion: str
    figures: dict[str, Any]
    """Everything else the table has: the rewards, further columns, the advantage."""


def read_samples(output_dir: str | Path, *, num_logs: int = 3, num_rows: int = 6) -> list[Sample]:
    """Reads completions from a run's first log, its last one and some between them.

    Args:
        output_dir: of the run.
        num_logs: completions tables to read, evenly spread over the run.
        num_rows: rows of each, evenly spread over the table.

    Returns:
        Samples in order of steps; none for a run without completions tables.
    """
    files = sorted((Path(output_dir) / COMPLETIONS_FOLDER).glob("completions_*.parquet"), key=_step)
    return [sample for file in _spread(files, num_logs) for sample in _read(file, num_rows)]


def _step(file: Path) -> int:
    """Steps have five digits or more: they are compared as numbers."""
    number = file.stem.removeprefix("completions_")
    return int(number) if number.isdigit() else -1


def _read(file: Path, num_rows: int) -> list[Sample]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    except (pa.ArrowInvalid, OSError):  # cut short by a kill
        return []
    return [
        Sample(int(row.pop("step")), str(row.pop("prompt")), str(row.pop("completion")), row)
        for row in _spread(rows, num_rows)
    ]


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` items, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / max(count - 1, 1))] for place in range(count)]
