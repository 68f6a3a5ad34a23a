"""Pages in a real browser; a module that imports this is skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip("no chromium in PATH: the page is not opened here", allow_module_level=True)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-sync",
]
PATIENCE_MS = 60_000
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Opened:
    """A page in the browser, and all it said and asked for."""

    browser_page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _hear: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._hear = {
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "dialog": self._refuse,
            "request": lambda request: self.requests.append(request.url),
        }
        for event, hear in self._hear.items():
            self.browser_page.on(event, hear)

    def leave(self) -> None:
        """Hear nothing more of the page."""
        for event, hear in self._hear.items():
            self.browser_page.remove_listener(event, hear)

    def _refuse(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(("file:", "data:"))]

    def evaluate(self, script: str) -> Any:
        return self.browser_page.evaluate(script)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


Page = TypeVar("Page", bound=Opened)


class Pages:
    """Pages that tests use one after another: each new one starts a process, which takes half a second."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._free: list[Any] = []
        self._opened: list[Opened] = []

    def open(self, kind: type[Page], url: str, *, width: int, height: int = 900, scheme: str) -> Page:
        page = self._free.pop() if self._free else self._browser.new_context().new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="null", color_scheme=scheme)
        opened = kind(page)
        self._opened.append(opened)
        page.goto(url)
        return opened

    def leave(self) -> None:
        """Leave all open pages as new ones are."""
        for opened in self._opened:
            opened.leave()
            page = opened.browser_page
            page.evaluate("localStorage.clear()")
            page.goto("about:blank")
            page.mouse.move(0, 0)
            self._free.append(page)
        self._opened.clear()


@pytest.fixture(scope="module")
def open_pages(browser: Any) -> Pages:
    return Pages(browser)


@pytest.fixture
def show(open_pages: Pages, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a text as a page."""

    def open_page(html: str, *, width: int = 1100, scheme: str = "light") -> Opened:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        return open_pages.open(Opened, path.as_uri(), width=width, scheme=scheme)

    yield open_page
    open_pages.leave()
