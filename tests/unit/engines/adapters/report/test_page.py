"""The page of a run: what it says first, what it leaves out, and that nothing becomes markup."""

from __future__ import annotations

from pathlib import Path

from flatout.engines.adapters.report.page import LONGEST_TEXT, page
from flatout.page.document import write_page
from tests.support.adapters import HOSTILE, evaluation, hostile_report, quality, report
from tests.support.page import Elements

TITLES = (
    "Scores",
    "Where rows go",
    "Can its confidence be trusted?",
    "Load and entropy",
    "Under another task&#x27;s adapter",
    "What it answers",
    "Adapters: learning",
    "The router: learning",
    "Both together: learning",
    "Notes",
)


def test_the_page_shows_all_of_a_run() -> None:
    html = page(report())
    for title in TITLES:
        assert f"<h2>{title}</h2>" in html, title
    text = Elements(html).text
    assert "97.9 %" in text and "5 of 5" in text
    assert "0.110 nats" in text and "all adapters with equal weights" in text
    assert "their answer lies behind the last token" in text
    assert text.count("loss: consistency") == 2  # phases two and three
    assert "(nothing)" in text  # an empty answer is said to be one


def test_what_is_not_known_is_left_out() -> None:
    html = page(report(evaluation=None, records=(), notes=(), device=None))
    assert "<h2>" not in html
    assert "None" not in Elements(html).text
    bare = page(report(evaluation=evaluation(routing=None, heads_only=None, shown=(), elapsed_s=None)))
    assert "Where rows go" not in bare and "heads-only</th>" not in bare.split("<details>")[0]
    unsure = page(report(evaluation=evaluation(routing=quality(threshold=0.0))))
    assert "At a threshold" not in unsure


def test_nothing_a_stranger_wrote_becomes_markup() -> None:
    html = page(hostile_report())
    elements = Elements(html)
    assert "script" not in elements.names and "img" not in elements.names
    assert HOSTILE[:25] in elements.text
    assert "<script>" not in html and "\x00" not in html


def test_long_texts_are_cut() -> None:
    html = page(hostile_report())
    assert "y" * LONGEST_TEXT in html and "y" * (LONGEST_TEXT + 1) not in html


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "run.html"
    write_page(page(report()), path)
    html = path.read_text(encoding="utf-8")
    assert "http://" not in html and "https://" not in html and "<script" not in html
    assert "default-src &#x27;none&#x27;" in html
    assert [each.name for each in path.parent.iterdir()] == ["run.html"]
