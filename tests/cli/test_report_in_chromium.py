"""The report of a run in a real browser: silent, whole on a phone, readable in the dark, deaf to names.

With FLATOUT_PICTURES=1 the pictures of docs/images are taken anew, of a run that is made up.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.monitor.past.recorded import read_recorded
from flatout.monitor.past.report import page
from tests.support.monitor import HOSTILE, kept_run, story

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]
PICTURES = "FLATOUT_PICTURES"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH: the page is not opened here")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Addresses of a healthy run that slows down, and of one with hostile names."""
    folder = tmp_path_factory.mktemp("runs")
    samples = story(seconds=420, wait=0.03, late_wait=0.42)
    hostile = tuple(
        replace(sample, notes=(HOSTILE,), gpus=(replace(sample.gpus[0], name=HOSTILE),))
        for sample in story(seconds=20, name=HOSTILE)
    )
    found = {}
    for name, each, pid in (("train", samples, 4711), (HOSTILE, hostile, 2)):
        path = folder / f"{pid}.html"
        path.write_text(page(read_recorded(kept_run(folder, each, name=name, pid=pid))), encoding="utf-8")
        found["plain" if pid == 4711 else "hostile"] = path
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []
    complaints: list[str] = []

    def open_page(which: str = "plain", *, width: int = 1100, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("dialog", lambda dialog: complaints.append(dialog.message))
        opened.on(
            "request", lambda request: complaints.append(request.url) if _is_outside(request.url) else None
        )
        opened.goto(pages[which].as_uri())
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _is_outside(address: str) -> bool:
    return not address.startswith(("file:", "data:"))


@pytest.mark.parametrize("which", ["plain", "hostile"])
@pytest.mark.parametrize("width", [360, 820, 1100])
def test_nothing_sticks_out_sideways(show: Any, which: str, width: int) -> None:
    assert show(which, width=width).evaluate(OVERFLOW) == 0


def test_every_curve_has_a_size_and_a_colour(show: Any) -> None:
    opened = show()
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


def test_hostile_names_are_text(show: Any) -> None:
    opened = show("hostile")
    assert opened.evaluate("document.querySelectorAll('script, img').length") == 0
    assert "<script>alert(1)</script>" in opened.inner_text("h1")


def test_dark_differs_from_light(show: Any) -> None:
    colours = [
        show(scheme=scheme).evaluate("getComputedStyle(document.documentElement).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours[0] != colours[1]


def test_it_prints(show: Any) -> None:
    assert show(scheme="dark").pdf().startswith(b"%PDF-")


@pytest.mark.skipif(not os.environ.get(PICTURES), reason=f"{PICTURES} is not set: docs/images stays as it is")
def test_pictures_of_the_docs(show: Any) -> None:
    for name, width, scheme, height in (
        ("report_light", 1000, "light", 1500),
        ("report_dark", 1000, "dark", 1500),
        ("report_phone", 390, "light", 1300),
    ):
        opened = show(width=width, scheme=scheme)
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        opened.screenshot(path=IMAGES / f"{name}.png", full_page=True, clip=clip)
        assert (IMAGES / f"{name}.png").stat().st_size > 10_000
