"""The progress bar on a terminal."""

from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback

from colocate_rl.progress.words import BUILDING, PHASE_NAMES, Speed

SHOWN = ("loss", "reward", "reward_std", "kl", "entropy", "completions/mean_length", "grad_norm", "learning_rate")
"""Figures of a step's log that go above the bar; all of them are in ``metrics.jsonl``."""


class PhaseBar(ProgressCallback):
    """transformers' bar for terminals, with the phase before it and reward and tokens/s behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.training_bar: Any
        self._building: Any = None
        self._speed = Speed()

    def show_phase(self, phase: str) -> None:
        """Shows the phase that has just begun; before training a line of its own, which vanishes."""
        if self.training_bar is not None:
            self.training_bar.set_description_str(PHASE_NAMES.get(phase, phase))
        elif phase == BUILDING:
            self._building = tqdm(bar_format="{desc} ({elapsed})", desc=PHASE_NAMES[phase], leave=False)
        elif self._building is not None:
            self._building.close()
            self._building = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        self._speed.restart(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows reward and speed; a step's log above the bar is cut down to the figures that say most."""
        figures = logs or {}
        if state.is_world_process_zero and self.training_bar is not None and "loss" in figures:
            if "reward" in figures:  # steps without a new generation batch have none
                self.training_bar.set_postfix_str(", ".join(self._speed.words(figures, state.global_step)))
            figures = {name: figures[name] for name in SHOWN if figures.get(name) is not None}
            figures["epoch"] = state.epoch
        super().on_log(args, state, control, logs=figures, **kwargs)
