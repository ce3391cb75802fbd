"""Where the loop of ``transformers.Trainer`` tells ours that a run, an epoch or a step begins or ends."""

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
