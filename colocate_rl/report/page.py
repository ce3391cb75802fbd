"""``report.html``: a run on one page that needs nothing but itself, neither network nor scripts.

Completions and names come from models, data sets and reward functions, so nothing of them is trusted: the template
escapes every value, pictures are SVG inside ``<img>`` (where a browser runs no script), and the page's own policy
(Content-Security-Policy) forbids scripts and every address outside the page.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colocate_rl.report.figures import Record, engine_shares, load_metrics, number, series
from colocate_rl.report.pictures import run_pictures
from colocate_rl.report.samples import Sample, read_samples

PAGE_FILE = "report.html"
FACTS_FILE = "run.json"
"""Settings, versions and placement of a run, written when it starts."""
MAX_TEXT_LENGTH = 4000
"""Characters of a prompt or completion that the page shows."""

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
# Overrides of the reading direction could show text other than it is; lone surrogates have no UTF-8.
_HARMFUL = [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)]
_VISIBLE = _PICTURES | dict.fromkeys(_HARMFUL, 0xFFFD)


def write_page(output_dir: str | Path) -> Path:
    """Writes ``report.html`` into a run's output folder, from the files that the run left there.

    Returns:
        The page's path.

    Raises:
        DataError: if there is no metrics file.
    """
    folder = Path(output_dir)
    facts_file = folder / FACTS_FILE
    facts = json.loads(facts_file.read_text("utf-8")) if facts_file.is_file() else {}
    page = folder / PAGE_FILE
    page.write_text(render(folder.resolve().name, load_metrics(folder), read_samples(folder), facts), "utf-8")
    return page


def render(title: str, records: Sequence[Record], samples: Sequence[Sample], facts: Mapping[str, Any]) -> str:
    """Makes the page's text.

    Args:
        title: of the page.
        records: of :func:`colocate_rl.report.load_metrics`.
        samples: of :func:`colocate_rl.report.read_samples`.
        facts: groups of facts by heading, each a dictionary; of :data:`FACTS_FILE`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("colocate_rl.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["visible"] = visible
    environment.filters["figure"] = _figure
    shares = engine_shares(records)
    return environment.get_template("page.html.jinja").render(
        title=title,
        headlines=headlines(records),
        pictures=run_pictures(records),
        shares=shares,
        num_prompts=sum(share.prompts for share in shares),
        num_tokens=sum(share.tokens for share in shares),
        samples=samples,
        facts=facts,
    )


def headlines(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The figures that a reader asks for first, by name; those a run does not have are left out."""
    found: list[tuple[str, str]] = []
    steps = [int(record["step"]) for record in records]
    if steps:
        found.append(("optimizer steps", f"{max(steps):,}"))
    for name, key in (("reward", "reward"), ("held-out reward", "eval_reward")):
        points = series(records, key)
        if points:
            found.append((name, " → ".join(f"{value:.3g}" for _, value in dict.fromkeys((points[0], points[-1])))))
    for name, key, form in (
        ("seconds per step", "step_time", "{:.2f}"),
        ("completion length", "completions/mean_length", "{:.1f}"),
        ("tokens seen", "num_tokens", "{:,.0f}"),
        ("seconds in all", "train_runtime", "{:,.0f}"),
    ):
        points = series(records, key)
        if points:
            found.append((name, form.format(points[-1][1])))
    return found


def visible(text: object) -> str:
    """Text as the page may show it: control characters made visible, very long text cut with a note."""
    shown = str(text)
    rest = len(shown) - MAX_TEXT_LENGTH
    if rest > 0:
        shown = f"{shown[:MAX_TEXT_LENGTH]} … ({rest:,} more characters)"
    return shown.translate(_VISIBLE)


def _figure(value: object) -> str:
    """A number in few digits; anything else as it is."""
    known = number(value) if isinstance(value, float) else None
    return f"{known:.4g}" if known is not None else str(value)
