"""Reward functions for workers, in a module that is quick to import."""

import os
import signal
import sys
import time
from typing import Any


def by_row(completions: list[str], answer: list[int], **_: Any) -> list[float | None]:
    """Depends on the row; waits so that calls end in another order than they began."""
    time.sleep(0.05 / answer[0])
    return [None if text == "ee" else len(text) + number for text, number in zip(completions, answer, strict=True)]


def by_ids(completion_ids: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    return [sum(ids) % 97 / 10 - number / 100 for ids, number in zip(completion_ids, answer, strict=True)]


def calls(prompts: list[str], log_extra: Any, log_metric: Any, trainer_state: Any, **_: Any) -> list[float]:
    log_extra("pid", [os.getpid()] * len(prompts))
    log_metric("seen step", trainer_state.global_step)
    return [float(len(prompts))] * len(prompts)


def bad(completions: list[str], **_: Any) -> list[float]:
    """Does what a completion says."""
    for text in completions:
        if text == "sleep":
            time.sleep(60)
        if text == "spin":
            while True:
                pass
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "leave":
            sys.exit(3)
        if text == "vanish":
            os._exit(3)
        if text == "raise":
            raise KeyError("told to")
    return [1.0] * len(completions)
