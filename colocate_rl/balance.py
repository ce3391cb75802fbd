"""Dealing out work of uneven size: pure arithmetic, shared by engines (groups) and ranks (rows)."""

from collections.abc import Sequence


def deal(costs: Sequence[float], room: Sequence[int], loads: Sequence[float] | None = None) -> list[list[int]]:
    """Deals items to parts so that the parts' costs become as even as a greedy rule makes them.

    Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): items in falling order
    of cost, each to the part with the least so far, among those that have room.

    Args:
        costs: one per item, at least 0.
        room: most items of each part; there must be room for all of them.
        loads: cost that each part has already; None: nothing.

    Returns:
        Item numbers of each part, largest cost first; equal costs keep their order.
    """
    assert len(costs) <= sum(room), (len(costs), room)
    totals = list(loads) if loads is not None else [0.0] * len(room)
    parts: list[list[int]] = [[] for _ in room]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        part = min((part for part, mine in enumerate(parts) if len(mine) < room[part]), key=lambda part: totals[part])
        parts[part].append(item)
        totals[part] += costs[item]
    return parts


def imbalance(loads: Sequence[float]) -> float:
    """Largest load over the mean load: 1 is even, n is everything on one of n. 1 where there is nothing."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
