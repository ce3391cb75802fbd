"""The completions table on its way to the trackers that ``report_to`` names and that have tables.

transformers' callbacks send the scalars and own the connections; here a table goes through the same connection.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

TABLE = "completions"
Rows = Sequence[Mapping[str, Any]]


def send_completions(callbacks: Iterable[TrainerCallback], rows: Rows, step: int) -> None:
    """Sends a completions table to each tracker among a trainer's callbacks; on the main rank only.

    Args:
        callbacks: of the trainer.
        rows: of the table, by column name; extra columns may be missing from some rows. None are sent when empty.
        step: optimizer step.
    """
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    for callback in callbacks:
        if isinstance(callback, WandbCallback):
            _log_table(callback._wandb, columns, cells, step)
        elif isinstance(callback, TrackioCallback):
            _log_table(callback._trackio, columns, cells, step)
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text(TABLE, as_markdown(columns, cells), step)
            callback.tb_writer.flush()


def _log_table(tracker: Any, columns: list[str], cells: list[list[Any]], step: int) -> None:
    """W&B and trackio have the same calls; the step goes along as transformers' scalars do."""
    table = tracker.Table(columns=columns, data=cells, allow_mixed_types=True)
    tracker.log({TABLE: table, "train/global_step": step})


def as_markdown(columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, for TensorBoard; whatever stands in a cell stays inside it and is not taken for markup."""
    head, *body = ("| " + " | ".join(map(_escape, line)) + " |" for line in [columns, *cells])
    return "\n".join([head, "|---" * len(columns) + "|", *body])


_MARKUP = str.maketrans({sign: f"&#{ord(sign)};" for sign in "&<>|*_`~\\[]()#!\"'"} | {"\n": "<br>", "\r": ""})


def _escape(cell: Any) -> str:
    return (f"{cell:.4g}" if isinstance(cell, float) else str(cell)).translate(_MARKUP)
