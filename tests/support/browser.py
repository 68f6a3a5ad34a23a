"""Pages in a real browser; a module that imports this is skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def __post_init__(self) -> None:
        self.browser_page.on("console", lambda message: self.complaints.append(message.text))
        self.browser_page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.browser_page.on("dialog", self._refuse)
        self.browser_page.on("request", lambda request: self.requests.append(request.url))

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


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a text as a page."""
    contexts = []

    def open_page(html: str, *, width: int = 1100, scheme: str = "light") -> Opened:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.browser_page.goto(path.as_uri())
        return opened

    yield open_page
    for context in contexts:
        context.close()
