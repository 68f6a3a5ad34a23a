"""The page in a real browser: it loads nothing, runs nothing, fits a phone and prints."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.doctor.report.page import page
from tests.support import doctor as builders
from tests.support.browser import OVERFLOW, browser, open_pages, show

__all__ = ["browser", "open_pages", "show"]

FULL = page(builders.evidence(ranks=builders.ranks()), builders.findings())
HOSTILE = page(builders.hostile_evidence(), builders.hostile_findings())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_silent_and_asks_no_host(show: Any, scheme: str) -> None:
    opened = show(FULL, scheme=scheme)
    assert opened.complaints == []
    assert opened.outside == []
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
    assert opened.outside == []
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
