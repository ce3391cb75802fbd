"""The progress bar of a run: which phase it is in, its step, reward and speed.

It takes the place of transformers' own bar, on a terminal and in a notebook, and only where that one would be shown
(``disable_tqdm``).
"""

from collections.abc import Callable
from typing import Any

from transformers import Trainer
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import ProgressCallback

from colocate_rl.progress.terminal import PhaseBar
from colocate_rl.progress.words import BUILDING

__all__ = ["BUILDING", "replace_bar"]


def replace_bar(trainer: Trainer, is_main: bool) -> Callable[[str], None]:
    """Puts a bar that shows phases in place of transformers' bar, if the trainer has that.

    Args:
        trainer: whose callbacks are looked through; a bar of the user's own class stays.
        is_main: whether this rank draws; the others lose their bar, which in a notebook would be drawn once per rank.

    Returns:
        To be told the name of each phase as it begins.
    """
    usual = transformers_trainer.DEFAULT_PROGRESS_CALLBACK
    if not any(type(callback) is usual for callback in trainer.callback_handler.callbacks):
        return _nothing
    trainer.remove_callback(usual)
    if not is_main:
        return _nothing
    bar: Any = PhaseBar() if usual is ProgressCallback else _notebook_bar()
    trainer.add_callback(bar)
    show_phase: Callable[[str], None] = bar.show_phase
    return show_phase


def _notebook_bar() -> Any:
    from colocate_rl.progress.notebook import NotebookPhaseBar  # needs IPython

    return NotebookPhaseBar()


def _nothing(phase: str) -> None:
    """No bar, nothing to show."""
