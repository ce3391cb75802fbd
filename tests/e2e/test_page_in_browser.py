"""``report.html`` in a real browser: everything is visible, nothing complains, nothing untrusted runs.

Needs playwright (dependency group ``browser``) and a Chromium on the machine; skipped without. ``make test`` needs
neither. ``SCREENSHOTS=folder`` keeps what the browser showed.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from colocate_rl.report import write_page
from tests.unit.test_report import HOSTILE, record, write_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on this machine", allow_module_level=True)


@pytest.fixture
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_the_page_is_whole_and_quiet(tmp_path: Path, browser: Any, width: int) -> None:
    scripts = [f"{text}<script>document.title = 'taken over'</script>" for text in HOSTILE]
    folder = write_run(tmp_path / "run", [record(step) for step in range(1, 30)], {1: scripts, 29: scripts})
    (folder / "run.json").write_text('{"Versions": {"torch": "2.13"}, "All settings": {"x": "<img src=x onerror=a>"}}')
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(write_page(folder).as_uri())
    assert complaints == []
    assert [url for url in requests if not url.startswith("data:")] == [(folder / "report.html").as_uri()]
    assert page.title() == "run"

    pictures = page.locator("figure img")
    assert pictures.count() == 6
    for number in range(pictures.count()):
        picture = pictures.nth(number)
        assert picture.evaluate("image => image.complete && image.naturalWidth > 0"), "its SVG could be read"
        box = picture.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
        assert picture.get_attribute("alt")
    table = page.locator("details[open] td.text").first
    assert table.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out sideways"
    for text in scripts:
        assert page.get_by_text(text, exact=True).count() == 2  # both logs; of the older one the table is folded
    if os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["SCREENSHOTS"]) / f"report-{width}.png", full_page=True)
