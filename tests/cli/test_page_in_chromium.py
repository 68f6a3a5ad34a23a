"""The page in a real browser: it loads nothing, runs nothing, fits a phone and prints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flatout.doctor.page import page
from tests.support import doctor as builders

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH: the page is not opened here")


@dataclass
class Opened:
    """A page in the browser, and all it said and asked for."""

    browser_page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def refuse(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def evaluate(self, script: str) -> Any:
        return self.browser_page.evaluate(script)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_page(html: str, *, width: int = 1100, scheme: str = "light") -> Opened:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.browser_page.on("console", lambda message: opened.complaints.append(message.text))
        opened.browser_page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.browser_page.on("dialog", opened.refuse)
        opened.browser_page.on("request", lambda request: opened.requests.append(request.url))
        opened.browser_page.goto(path.as_uri())
        return opened

    yield open_page
    for context in contexts:
        context.close()


FULL = page(builders.evidence(ranks=builders.ranks()), builders.findings())
HOSTILE = page(builders.hostile_evidence(), builders.hostile_findings())
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def outside(opened: Opened) -> list[str]:
    return [url for url in opened.requests if not url.startswith(("file:", "data:"))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_silent_and_asks_no_host(show: Any, scheme: str) -> None:
    opened = show(FULL, scheme=scheme)
    assert opened.complaints == []
    assert outside(opened) == []
    assert any(url.startswith("file:") for url in opened.requests)


def test_findings_drawings_and_the_guilty_lines_are_visible(show: Any) -> None:
    opened = show(FULL)
    for number, finding in enumerate(builders.findings(), start=1):
        article = opened.browser_page.locator(f"#finding-{number}")
        assert article.is_visible()
        assert finding.name in article.inner_text()
    guilty = opened.browser_page.locator("tr.guilty")
    assert guilty.count() == 3
    marked, plain = (
        opened.evaluate(f"getComputedStyle(document.querySelector('{row}')).backgroundColor")
        for row in ("tr.guilty", ".source tr:not(.guilty)")
    )
    assert marked != plain
    sizes = opened.evaluate(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(sizes) >= 6
    assert all(size > 0 for size in sizes)


def test_a_link_of_the_list_leads_to_its_finding(show: Any) -> None:
    opened = show(FULL)
    opened.browser_page.click("a[href='#finding-3']")
    assert opened.evaluate("location.hash") == "#finding-3"
    assert opened.evaluate("document.querySelector(':target').id") == "finding-3"


def test_hostile_names_are_text_and_do_nothing(show: Any) -> None:
    opened = show(HOSTILE)
    assert opened.complaints == []
    assert outside(opened) == []
    assert opened.evaluate("document.querySelectorAll('script, img').length") == 0
    assert "<script>alert(1)</script>" in opened.browser_page.inner_text("h1")
    assert "<script>alert(1)</script>" in opened.browser_page.inner_text("tr.guilty")


def test_the_policy_of_the_page_would_stop_a_script_that_got_in(show: Any) -> None:
    broken = FULL.replace("</main>", "<script>document.title = 'owned'</script></main>")
    assert broken != FULL
    opened = show(broken)
    assert opened.evaluate("document.title") != "owned"


@pytest.mark.parametrize("html", [FULL, HOSTILE], ids=["full", "hostile"])
@pytest.mark.parametrize("width", [360, 390, 820])
def test_nothing_sticks_out_sideways(show: Any, html: str, width: int) -> None:
    assert show(html, width=width).evaluate(OVERFLOW) == 0


def test_dark_and_light_differ_and_both_can_be_read(show: Any) -> None:
    def luminances(scheme: str) -> tuple[float, float]:
        colours = show(FULL, scheme=scheme).evaluate(
            "['color', 'backgroundColor'].map(k => getComputedStyle(document.documentElement)[k]"
            ".match(/\\d+/g).slice(0, 3).map(Number))"
        )
        ink, paper = (
            sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True)) for rgb in colours
        )
        return ink, paper

    ink, paper = luminances("light")
    assert paper - ink > 150
    ink, paper = luminances("dark")
    assert ink - paper > 150


def test_the_page_prints_in_light_colours(show: Any) -> None:
    opened = show(FULL, scheme="dark")
    document = opened.browser_page.pdf()
    assert document.startswith(b"%PDF-")
    assert document.count(b"/Type /Page\n") >= 2
    opened.browser_page.emulate_media(media="print")
    paper = opened.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
