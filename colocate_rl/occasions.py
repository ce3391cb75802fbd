"""Whose a log is: figures are joined over ranks only where all of them log."""

import contextlib
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any


class Occasion(Enum):
    """Why something is logged."""

    STEPS = auto()
    """The trainer's own log, of some optimizer steps or of the whole run; all ranks come to it together."""
    EVALUATION = auto()
    """The figures of an evaluation, which all ranks have."""
    USER = auto()
    """Something of the user's, who may log on one rank alone, also from within the trainer's logs and evaluations."""


class Occasions:
    """Tells the occasions of a run's logs apart."""

    def __init__(self) -> None:
        self._evaluated = False
        self._together = False

    def evaluated(self) -> None:
        """The next log is an evaluation's, whatever its prefix."""
        self._evaluated = True

    @contextlib.contextmanager
    def only_predicting(self) -> Iterator[None]:
        """A context whose evaluation is not logged."""
        try:
            yield
        finally:
            self._evaluated = False

    @contextlib.contextmanager
    def all_ranks(self) -> Iterator[None]:
        """A context that all ranks enter, in which the trainer logs."""
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def of(self, logs: Mapping[str, Any]) -> Occasion:
        """To be asked once for each log."""
        is_evaluation, self._evaluated = self._evaluated, False
        if is_evaluation:
            return Occasion.EVALUATION
        if self._together and not logs.keys().isdisjoint(("learning_rate", "train_runtime")):
            return Occasion.STEPS
        return Occasion.USER
