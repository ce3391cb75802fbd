"""The report of a run: figures read back, pictures, and a page that shows untrusted text as text."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from colocate_rl.errors import DataError
from colocate_rl.report import command, engine_shares, load_metrics, read_samples, series, write_page
from colocate_rl.report.page import MAX_TEXT_LENGTH, visible
from colocate_rl.report.pictures import run_pictures

pytestmark = pytest.mark.unit

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</td></table><h1>taken over",
    "{{ 7 * 7 }} {% raw %}",
    "<!--",
    "&lt;b&gt;",
)

TEMPLATE_TAGS = {
    *("html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "p", "dl", "div", "dt", "dd"),
    *("figure", "figcaption", "img", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward": step / 10,
        "loss": -0.1 * step,
        "kl": 0.01 * step,
        "rewards/$x$ <b>/mean": 0.5,
        "rewards/_second/mean": None if step == 1 else 0.25,
        "engine/0/prompts": 4,
        "engine/0/tokens": 40,
        "engine/0/generate_s": 0.5,
        "engine/0/tokens_per_s": 80.0,
        "engine/1/prompts": 0,
        "engine/1/tokens": 0,
        "engine/1/generate_s": 0.0,
        "engine/1/tokens_per_s": None,
        "time/generate_s": 0.5,
        "time/train_s": 0.25,
        "step_time": 0.8,
        **more,
    }


def write_run(folder: Path, records: list[dict[str, Any]], completions: dict[int, list[str]] | None = None) -> Path:
    (folder / "completions").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records), "utf-8")
    for step, texts in (completions or {}).items():
        columns = {
            "step": [step] * len(texts),
            "prompt": [f"p{number} {text}" for number, text in enumerate(texts)],
            "completion": texts,
            "<b>reward": [0.5] * len(texts),
            "advantage": [float(number) for number in range(len(texts))],
        }
        pq.write_table(pa.table(columns), folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


class Page(HTMLParser):
    """What a browser would make of the page: the tags in it and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def test_a_page_shows_untrusted_text_as_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run", [record(1), record(2)], {2: list(HOSTILE)})
    facts = {"Set<tings>": {"<script>name": "<script>value</script>"}}
    (folder / "run.json").write_text(json.dumps(facts), "utf-8")
    text = write_page(folder).read_text("utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= TEMPLATE_TAGS
    assert not page.comments
    for hostile in (*HOSTILE, "<script>value</script>", "<script>name", "Set<tings>", "<b>reward", "<b>run"):
        assert hostile in page.texts, hostile
    assert "49" not in [line.strip() for line in page.texts]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert str(attributes.get(name, "data:")).startswith("data:"), "nothing is fetched from anywhere"
    policies = [attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_characters_that_deceive_are_made_visible() -> None:
    assert visible("a\x00b\x1b[31m\x7f\tc\nd") == "a␀b␛[31m␡\tc\nd"
    assert visible("x\u202ey\u2066z\x9b\ud800") == "x\ufffdy\ufffdz\ufffd\ufffd"
    assert visible("é中\U0001f600 العربية") == "é中\U0001f600 العربية"
    shown = visible("4" * (MAX_TEXT_LENGTH + 1234))
    assert shown == "4" * MAX_TEXT_LENGTH + " … (1,234 more characters)"


def test_pictures_draw_every_value_and_nothing_that_is_missing() -> None:
    records = [record(step, eval_reward=0.9 if step == 12 else None) for step in range(1, 13)]
    pictures = {picture.title: picture for picture in run_pictures(records)}
    assert list(pictures)[:3] == [
        "Reward and held-out reward",
        "Where the time of a step goes",
        "Reward of each function",
    ]
    assert "Entropy of the policy (nats per token)" not in pictures
    assert (
        "kl: 0.01 at step 1, 0.12 at step 12" in pictures["KL divergence from the reference (nats per token)"].summary
    )
    for picture in pictures.values():
        kind, _, data = picture.address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn = base64.b64decode(data).decode()
        assert drawn.rstrip().endswith("</svg>")
        assert "<script" not in drawn
    legend = base64.b64decode(pictures["Reward of each function"].address.partition(",")[2]).decode()
    assert ">$x$ &lt;b&gt;</text>" in legend, "a name is no formula and no markup"
    assert ">_second</text>" in legend
    # The loss falls in a straight line: 12 points, evenly spaced across and down.
    loss = base64.b64decode(pictures["Loss"].address.partition(",")[2]).decode()
    lines = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path) for path in re.findall(r'<path d="([^"]+)"', loss)]
    line = max(lines, key=len)
    across = [float(x) for x, _ in line]
    down = [float(y) for _, y in line]
    assert down[-1] > down[0]
    slope = (down[-1] - down[0]) / (across[-1] - across[0])
    assert all(
        y == pytest.approx(down[0] + slope * (x - across[0]), abs=0.01) for x, y in zip(across, down, strict=True)
    )


def test_the_page_tells_engines_apart_and_marks_an_idle_one(tmp_path: Path) -> None:
    page = Page(write_page(write_run(tmp_path / "run", [record(1), record(2)])).read_text("utf-8"))
    rows = [attributes.get("class") for tag, attributes in page.tags if tag == "tr"]
    assert rows.count("idle") == 1
    for figure in ("8", "80", "100.0%", "1.0"):
        assert figure in page.texts
    assert "0.1 → 0.2" in page.texts
    assert any("log_completions=True" in text for text in page.texts)
    assert any("no run.json" in text for text in page.texts)


def test_samples_come_from_the_first_the_last_and_a_middle_log(tmp_path: Path) -> None:
    texts = [f"c{number}" for number in range(11)]
    folder = write_run(tmp_path / "run", [record(1)], dict.fromkeys((5, 10, 15, 20, 100000), texts))
    (folder / "completions" / "completions_00007.parquet").write_bytes(b"PAR1 cut short")
    samples = read_samples(folder, num_logs=3, num_rows=3)
    assert [sample.step for sample in samples] == [5, 5, 5, 10, 10, 10, 100000, 100000, 100000]
    assert [sample.completion for sample in samples] == ["c0", "c5", "c10"] * 3
    assert samples[0].figures == {"<b>reward": 0.5, "advantage": 0.0}
    assert read_samples(tmp_path) == []


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(1), record(2), record(3), record(2, reward=0.7)])
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "reward": 0.')
    records = load_metrics(folder)
    assert series(records, "reward") == [(1, 0.1), (2, 0.7)]
    assert [(share.engine, share.prompts, share.tokens) for share in engine_shares(records)] == [(0, 8, 80), (1, 0, 0)]


def test_the_command_writes_plot_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [record(1), record(2)])
    command.main([str(folder)])
    assert (folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert "Page: " + str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").is_file()
    with pytest.raises(SystemExit) as ended:
        command.main([str(tmp_path)])
    assert ended.value.code == 1
    assert "no metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(DataError):
        write_page(tmp_path)
