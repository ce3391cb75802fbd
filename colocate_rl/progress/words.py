"""What every progress bar says, wherever it is drawn."""

from collections.abc import Mapping
from typing import Any

BUILDING = "build"
PHASE_NAMES = {
    BUILDING: "building engine",
    "generate": "generate",
    "score": "score",
    "train": "train",
    "sync": "sync weights",
}
"""How a bar names the phases of the run's clock."""


class Speed:
    """Completion tokens per second of whole steps, from one log to the next."""

    def __init__(self) -> None:
        self._last_step = 0

    def restart(self, step: int) -> None:
        """Counts steps from here."""
        self._last_step = step

    def words(self, figures: Mapping[str, Any], step: int) -> list[str]:
        """Reward and speed of the steps since the last log, as a person reads them."""
        num_steps, self._last_step = step - self._last_step, step
        words = [f"reward {figures['reward']:.3f}"] if figures.get("reward") is not None else []
        tokens = sum(
            value for name, value in figures.items() if name.startswith("engine/") and name.endswith("/tokens")
        )
        seconds = (figures.get("step_time") or 0.0) * num_steps
        if seconds > 0:
            words.append(f"{tokens / seconds:,.0f} tokens/s")
        return words
