"""A run's figures as it left them in ``metrics.jsonl`` (one object per log), missing ones and None included."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colocate_rl.errors import DataError

METRICS_FILE = "metrics.jsonl"
PHASES = {"generate": "#4c78a8", "score": "#b279a2", "sync": "#e45756", "train": "#f2a541"}
"""Phases of a step, in the order they happen, and their colours in plots."""

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
            index, _, figure = rest.partition("/")
            if area == "engine" and index.isdigit():
                engine = sums.setdefault(int(index), {"prompts": 0.0, "tokens": 0.0, "generate_s": 0.0})
                if figure in engine:
                    engine[figure] += number(value) or 0.0
    return [
        EngineShare(index, round(engine["prompts"]), round(engine["tokens"]), engine["generate_s"])
        for index, engine in sorted(sums.items())
    ]


def series(records: Iterable[Record], key: str) -> list[tuple[int, float]]:
    """Every (step, value) at which ``key`` has a finite value."""
    points = ((record["step"], number(record.get(key))) for record in records)
    return [(int(step), value) for step, value in points if value is not None]


def number(value: object) -> float | None:
    """The value as a finite float, else None."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
