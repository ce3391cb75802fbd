"""A picture of who did what when: one row per rank and engine, from the ``timeline.jsonl`` of a run."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

NAMES = {"generate": "generate", "sync": "weight sync", "train": "train", "score": "score", "wait": "wait for engines"}
COLOURS = {"generate": "#4477AA", "sync": "#EE6677", "train": "#228833", "score": "#CCBB44", "wait": "#DDDDDD"}


def load(path: Path, num_steps: int | None = None) -> list[Event]:
    """The events of a run, seconds counted from the first one.

    Args:
        path: of ``timeline.jsonl``.
        num_steps: only the last so many steps (a step begins with a weight sync); None: all.
    """
    events: list[Event] = [json.loads(line) for line in path.read_text().splitlines()]
    syncs = sorted(event["start"] for event in events if event["phase"] == "sync" and event.get("rank") == 0)
    first = min(event["start"] for event in events)
    if num_steps is not None and len(syncs) > num_steps:
        first = syncs[-num_steps]
    return [
        {**event, "start": max(event["start"] - first, 0.0), "end": event["end"] - first}
        for event in events
        if event["end"] > first
    ]


def lanes(events: list[Event]) -> dict[str, list[Event]]:
    """Events by who they are about, ranks first. Ranks wait while engines generate; a weight sync takes both."""
    found: dict[str, list[Event]] = {}
    syncs = [event for event in events if event["phase"] == "sync" and event["rank"] == 0]
    for event in sorted(events, key=lambda event: ("engine" in event, event.get("engine", event.get("rank")))):
        if "engine" in event:
            found.setdefault(f"engine {event['engine']}", list(syncs)).append(event)
        else:
            phase = "wait" if event["phase"] == "generate" else event["phase"]
            found.setdefault(f"rank {event['rank']}", []).append({**event, "phase": phase})
    return found


def draw(events: list[Event], path: Path, title: str) -> None:
    """Writes a PNG with one row per rank and engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = lanes(events)
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.45 * len(rows)), layout="constrained")
    for phase, name in NAMES.items():
        for place, mine in enumerate(rows.values()):
            spans = [(event["start"], event["end"] - event["start"]) for event in mine if event["phase"] == phase]
            axes.broken_barh(spans, (place - 0.35, 0.7), color=COLOURS[phase], label=name if place == 0 else None)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, max(event["end"] for event in events))
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(NAMES), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
