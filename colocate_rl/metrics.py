"""Figures on their way to a log: sums kept on their device, joined over ranks once per log, and clocks for phases."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from colocate_rl.collectives import Collectives

SAME_SPAN_S = 0.002
"""A phase that goes on after at most so many seconds has not ended."""


class MetricBuffer:
    """Collects figures between two logs.

    A *mean* is a number that every rank knows alike or that each rank adds its own of; a *share* is a numerator over a
    denominator, both summed over ranks and time (token means); an *extreme* is a largest or smallest value.
    """

    def __init__(self) -> None:
        self._shares: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._largest: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = defaultdict(float)

    def mean(self, name: str, value: float | torch.Tensor, weight: float = 1.0) -> None:
        """Adds one value to the (weighted) mean ``name``; NaN is skipped."""
        number = torch.as_tensor(value, dtype=torch.float64).detach()
        known = (~number.isnan()) * weight
        self._shares[name].append(torch.stack([number.nan_to_num(nan=0.0) * known, known.to(torch.float64)]))

    def share(self, name: str, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
        """Adds to numerator and denominator of ``name``, without waiting for the device."""
        pair = torch.stack([numerator.detach().to(torch.float64), denominator.detach().to(torch.float64)])
        self._shares[name].append(pair)

    def largest(self, name: str, value: torch.Tensor) -> None:
        """Offers a value for the maximum ``name``; NaN is skipped."""
        self._largest[name].append(
            value.detach().to(torch.float64).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        )

    def smallest(self, name: str, value: torch.Tensor) -> None:
        """Offers a value for the minimum ``name``; NaN is skipped."""
        self.largest(f"-{name}", -value)

    def total(self, name: str, value: float) -> None:
        """Adds to the sum ``name`` over the logging window, which every rank knows alike."""
        self._totals[name] += value

    def latest(self, name: str, value: float) -> None:
        """Sets ``name``, which every rank knows alike, to its newest value; it is reported until it changes."""
        self._latest[name] = value

    def flush(self, collectives: Collectives) -> dict[str, float | None]:
        """Joins all ranks' figures (every rank must call it) and starts afresh.

        Returns:
            One value per name; None where there is nothing to average.
        """
        result: dict[str, float | None] = {**self._latest, **self._totals}
        names = collectives.gather_objects((list(self._shares), list(self._largest)))
        share_names = sorted({name for shares, _ in names for name in shares})
        largest_names = sorted({name for _, largest in names for name in largest})
        if share_names:
            nothing = [torch.zeros(2, dtype=torch.float64)]
            mine = [torch.stack(self._shares.get(name, nothing)).sum(0).cpu() for name in share_names]
            for name, (numerator, denominator) in zip(
                share_names, collectives.sum(torch.stack(mine)).tolist(), strict=True
            ):
                result[name] = numerator / denominator if denominator else None
        if largest_names:
            nothing = [torch.tensor(-math.inf, dtype=torch.float64)]
            mine = [torch.stack(self._largest.get(name, nothing)).max().cpu() for name in largest_names]
            for name, top in zip(largest_names, collectives.max(torch.stack(mine)).tolist(), strict=True):
                value = None if math.isinf(top) else top
                result[name.removeprefix("-")] = -value if value is not None and name.startswith("-") else value
        self.clear()
        return result

    def clear(self) -> None:
        """Starts afresh without a log; what :meth:`latest` has set stays."""
        self._shares.clear()
        self._largest.clear()
        self._totals.clear()


class PhaseSpan(NamedTuple):
    """When a phase began and ended, on the clock that all processes of a machine share (``time.monotonic``)."""

    phase: str
    start: float
    end: float


class Lap(NamedTuple):
    """What a clock says about one lap."""

    total: float
    """Its seconds."""
    phases: dict[str, float]
    """How many of them each phase took."""
    spans: list[PhaseSpan]
    """Each phase as often as it came, in order."""
    start: float
    end: float


class PhaseClock:
    """Seconds spent in named phases since the last :meth:`lap`.

    Args:
        synchronize: waits for the device, so that its pending work is charged to the phase that queued it.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._spans: list[PhaseSpan] = []
        self._start = time.monotonic()
        self.announce: Callable[[str], None] = lambda phase: None
        """Told the name of each phase as it begins; what is no phase is "train"."""

    @classmethod
    def of(cls, device: torch.device) -> "PhaseClock":
        """A clock for work on a device."""
        return cls((lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a ``with`` block."""
        self._synchronize()
        self.announce(name)
        start = time.monotonic()
        try:
            yield
        finally:
            self._synchronize()
            self._note(PhaseSpan(name, start, time.monotonic()))
            self.announce("train")

    def _note(self, span: PhaseSpan) -> None:
        """Adds a span; to the last one, when it goes on: a wait that is made of many looks is one wait."""
        last = self._spans[-1] if self._spans else None
        if last is not None and last.phase == span.phase and span.start - last.end < SAME_SPAN_S:
            self._spans[-1] = last._replace(end=span.end)
        else:
            self._spans.append(span)

    def lap(self) -> Lap:
        """The time since the last lap; then starts the next one."""
        self._synchronize()
        now = time.monotonic()
        phases: dict[str, float] = defaultdict(float)
        for span in self._spans:
            phases[span.phase] += span.end - span.start
        lap = Lap(now - self._start, dict(phases), self._spans, self._start, now)
        self._spans = []
        self._start = now
        return lap

    def restart(self) -> None:
        """Starts a lap without reporting the last one."""
        self._spans = []
        self._start = time.monotonic()
