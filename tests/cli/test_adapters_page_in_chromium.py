"""The report of an adapters run in a real browser: silent, self-contained, and deaf to what it quotes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.report.page import page
from tests.support.adapters import hostile_report, report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
COLOURED = (
    "[...document.querySelectorAll('.matrix td[style]')].map(cell => getComputedStyle(cell).backgroundColor)"
)
DRAWN = (
    "[...document.querySelectorAll('circle, .rows rect')]"
    ".map(each => each.getBoundingClientRect()).map(box => box.width * box.height)"
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH: the page is not opened here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("run", [report(), hostile_report()], ids=["full", "hostile"])
def test_the_page_is_silent_and_fits(run: Any, scheme: str, width: int, browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(run), encoding="utf-8")
    complaints: list[str] = []
    requests: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        opened = context.new_page()
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        opened.on("request", lambda request: requests.append(request.url))
        opened.goto(path.as_uri())
        assert complaints == []
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        assert opened.evaluate(OVERFLOW) == 0
        assert opened.evaluate("document.querySelectorAll('script, img').length") == 0
        assert run.name[:20] in opened.inner_text("h1")
        colours = opened.evaluate(COLOURED)
        assert colours and all(colour != "rgba(0, 0, 0, 0)" for colour in colours)
        drawn = opened.evaluate(DRAWN)
        assert drawn and max(drawn) > 0
    finally:
        context.close()
