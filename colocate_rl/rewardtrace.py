"""The rewards of each prompt, step by step: ``rewards.jsonl`` in the output folder."""

import json
import logging
import math
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

import torch

TRACE_FILE = "rewards.jsonl"
MAX_BYTES = 2**28
"""Size at which the file is begun anew; the one before stays as ``rewards.jsonl.1``."""


class RewardTrace:
    """Appends one line per prompt and rollout, on one rank.

    A line is an object with ``step`` (optimizer steps done when the completions were sampled), ``prompt`` (its index in
    the data set; in a stream its place within the pass), ``trained`` (False: dynamic sampling replaced the group) and
    ``rewards``: for each function one number per completion, null for None.

    Args:
        folder: made when missing.
        names: of the reward functions.
        max_bytes: see :data:`MAX_BYTES`.
    """

    def __init__(self, folder: Path, names: Sequence[str], max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._names = list(names)
        self._file = RotatingFileHandler(folder / TRACE_FILE, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def add(self, step: int, indices: Sequence[int], rewards: torch.Tensor, *, trained: bool) -> None:
        """Writes all ranks' rows of a rollout.

        Args:
            step: optimizer steps done.
            indices: prompt index of each row.
            rewards: [n, F], NaN for None.
            trained: whether the rows are trained on.
        """
        groups: dict[int, list[int]] = {}
        for row, index in enumerate(indices):
            groups.setdefault(index, []).append(row)
        table = [[None if math.isnan(value) else round(value, 6) for value in row] for row in rewards.tolist()]
        for index, rows in groups.items():
            by_name = {name: [table[row][column] for row in rows] for column, name in enumerate(self._names)}
            self._write(json.dumps({"step": step, "prompt": index, "trained": trained, "rewards": by_name}))
        self._file.flush()

    def _write(self, line: str) -> None:
        self._file.emit(logging.LogRecord("", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Closes the file; what was written stays."""
        self._file.close()
