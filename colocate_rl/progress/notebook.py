"""The progress bar inside a notebook; imported only there, because transformers' one needs IPython."""

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback

from colocate_rl.progress.words import PHASE_NAMES, Speed


class NotebookPhaseBar(NotebookProgressCallback):
    """transformers' bar for notebooks, with phase, reward and tokens/s beside it and the reward in its table."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = ""
        self._words: list[str] = []
        self._speed = Speed()

    def show_phase(self, phase: str) -> None:
        """Shows the phase that has just begun."""
        self._phase = PHASE_NAMES.get(phase, phase)
        self._show()

    def _show(self) -> None:
        bar = self.training_tracker
        if bar is not None:
            bar.prefix = f"{self._phase}: " + ", ".join(self._words)
            bar.display()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the bar at once: a first step that compiles kernels takes long."""
        super().on_train_begin(args, state, control, **kwargs)
        self._speed.restart(state.global_step)
        assert self.training_tracker is not None
        self.training_tracker.update(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds a row to the table: the loss, as transformers does, and the reward."""
        super().on_log(args, state, control, logs=logs, **kwargs)
        if logs and logs.get("reward") is not None and self.training_tracker is not None:
            self._words = self._speed.words(logs, state.global_step)
            self.training_tracker.write_line({"Step": state.global_step, "Reward": logs["reward"]})
            self._show()
