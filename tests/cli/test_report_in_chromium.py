"""Reports in a real browser: silent, whole on a phone, readable in the dark, deaf to what they quote.

With FLATOUT_PICTURES=1 the pictures of docs/images are taken anew, of a run that is made up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.report.page import page as adapters_page
from flatout.engines.steering.report.page import page as steering_page
from flatout.monitor.past.outline import read_outline
from flatout.monitor.past.report import page
from tests.support.adapters import hostile_report, report
from tests.support.browser import OVERFLOW, Opened, browser, open_pages, show
from tests.support.monitor import HOSTILE, kept_run, story
from tests.support.steering import hostile_study, study

__all__ = ["browser", "open_pages", "show"]

PICTURES = "FLATOUT_PICTURES"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
AREAS = ".map(each => each.getBoundingClientRect()).map(box => box.width * box.height)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of a healthy run that slows down, and of one with hostile names."""
    folder = tmp_path_factory.mktemp("runs")
    samples = story(seconds=420, wait=0.03, late_wait=0.42)
    hostile = tuple(
        replace(sample, notes=(HOSTILE,), gpus=(replace(sample.gpus[0], name=HOSTILE),))
        for sample in story(seconds=20, name=HOSTILE)
    )
    found = {}
    for name, each, pid in (("train", samples, 4711), (HOSTILE, hostile, 2)):
        kept = kept_run(folder, each, name=name, pid=pid)
        found["plain" if pid == 4711 else "hostile"] = page(read_outline(kept))
    return found


@pytest.fixture
def show_run(show: Any, pages: dict[str, str]) -> Iterator[Any]:
    """A function that opens the page of a run; it says nothing and asks for nothing."""
    found: list[Opened] = []

    def open_page(which: str = "plain", *, width: int = 1100, scheme: str = "light") -> Any:
        found.append(show(pages[which], width=width, scheme=scheme))
        return found[-1].browser_page

    yield open_page
    assert [opened.complaints + opened.outside for opened in found] == [[] for _ in found]


@pytest.mark.parametrize("which", ["plain", "hostile"])
@pytest.mark.parametrize("width", [360, 820, 1100])
def test_nothing_sticks_out_sideways(show_run: Any, which: str, width: int) -> None:
    assert show_run(which, width=width).evaluate(OVERFLOW) == 0


def test_every_curve_has_a_size_and_a_colour(show_run: Any) -> None:
    opened = show_run()
    curves = opened.evaluate(
        "[...document.querySelectorAll('.framed polyline')].map(line => {"
        " const box = line.getBoundingClientRect();"
        " return [box.width, getComputedStyle(line).stroke]; })"
    )
    assert len(curves) >= 14
    assert all(width > 100 and colour != "none" for width, colour in curves)
    filled = opened.evaluate(
        "[...document.querySelectorAll('polygon, .rows rect')].map(s => getComputedStyle(s).fill)"
    )
    assert filled and "rgb(0, 0, 0)" not in filled  # a colour that the style sheet does not know is black


def test_hostile_names_are_text(show_run: Any) -> None:
    opened = show_run("hostile")
    assert opened.evaluate("document.querySelectorAll('script, img').length") == 0
    assert "<script>alert(1)</script>" in opened.inner_text("h1")


def test_dark_differs_from_light(show_run: Any) -> None:
    colours = [
        show_run(scheme=scheme).evaluate("getComputedStyle(document.documentElement).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


def test_it_prints(show_run: Any) -> None:
    assert show_run(scheme="dark").pdf().startswith(b"%PDF-")


@pytest.mark.skipif(not os.environ.get(PICTURES), reason=f"{PICTURES} is not set: docs/images stays as it is")
def test_pictures_of_the_docs(show_run: Any) -> None:
    for name, width, scheme, height in (
        ("report_light", 1000, "light", 1500),
        ("report_dark", 1000, "dark", 1500),
        ("report_phone", 390, "light", 1300),
    ):
        opened = show_run(width=width, scheme=scheme)
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        opened.screenshot(path=IMAGES / f"{name}.png", full_page=True, clip=clip)
        assert (IMAGES / f"{name}.png").stat().st_size > 10_000


# Engines


def opened_quietly(show: Any, html: str, name: str, *, scheme: str, width: int) -> Opened:
    opened: Opened = show(html, width=width, scheme=scheme)
    assert opened.complaints == opened.outside == []
    assert opened.evaluate(OVERFLOW) == 0
    assert opened.evaluate("document.querySelectorAll('script, img').length") == 0
    assert name[:20] in opened.browser_page.inner_text("h1")
    return opened


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("run", [report(), hostile_report()], ids=["full", "hostile"])
def test_the_page_of_adapters_is_silent_and_fits(show: Any, run: Any, scheme: str, width: int) -> None:
    opened = opened_quietly(show, adapters_page(run), run.name, scheme=scheme, width=width)
    colours = opened.evaluate(
        "[...document.querySelectorAll('.matrix td[style]')]"
        ".map(cell => getComputedStyle(cell).backgroundColor)"
    )
    assert colours and all(colour != "rgba(0, 0, 0, 0)" for colour in colours)
    drawn = opened.evaluate(f"[...document.querySelectorAll('circle, .rows rect')]{AREAS}")
    assert drawn and max(drawn) > 0


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("record", [study(), hostile_study()], ids=["full", "hostile"])
def test_the_page_of_a_study_is_silent_and_fits(show: Any, record: Any, scheme: str, width: int) -> None:
    opened = opened_quietly(show, steering_page(record), record.name, scheme=scheme, width=width)
    cells = opened.evaluate(
        f"[...document.querySelectorAll('.matrix td[style], .matrix td.outlined')]{AREAS}"
    )
    assert cells and min(cells) > 0
    assert opened.browser_page.locator("td.outlined").count() == 1
