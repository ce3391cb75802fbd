"""Where the loop of ``transformers.Trainer`` tells ours that a run, an epoch or a step begins or ends."""

import gc
from typing import Any, Protocol

from transformers import TrainerCallback


class Listener(Protocol):
    """What is told."""

    def resume_at(self, global_step: int) -> None:
        """A run begins after so many optimizer steps."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        ...

    def begin_step(self) -> None:
        """An optimizer step begins."""
        ...

    def end_step(self) -> None:
        """It has ended."""
        ...


class StepHooks(TrainerCallback):
    """Tells the trainer where its steps begin and end."""

    def __init__(self, trainer: Listener) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts the trainer where a resumed run stands within its generation batch and its random streams."""
        self._trainer.resume_at(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives each epoch its own order of prompts, also after a resume."""
        self._trainer.set_epoch(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the step's clock."""
        self._trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops it."""
        self._trainer.end_step()


class SteadyHeap(TrainerCallback):
    """Takes what a run has made by the end of its first step out of Python's garbage collection, until the run ends.

    Libraries, compiled code and an engine are a million objects that stay. Every full collection walks over all of
    them, and decoding makes objects fast enough to bring such collections about.
    """

    def __init__(self) -> None:
        self._frozen = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step, when everything has been made and compiled."""
        if not self._frozen:
            gc.collect()
            gc.freeze()
            self._frozen = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run has ended by itself."""
        self.thaw()

    def thaw(self) -> None:
        """The objects may go with whoever held them; may be called twice."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
