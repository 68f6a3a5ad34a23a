"""The page of a study: what it says first, what it leaves out, and that nothing becomes markup."""

from __future__ import annotations

from pathlib import Path

from flatout.engines.steering.report.page import LONGEST_TEXT, page
from flatout.engines.steering.report.record import Interval, Retest
from flatout.page.document import write_page
from tests.support.page import Elements
from tests.support.steering import HOSTILE, hostile_study, study


def test_the_page_shows_all_of_a_study() -> None:
    html = page(study())
    for title in (
        "On fresh questions",
        "Layer and strength",
        "What it costs",
        "What it reads like",
        "The best trials",
    ):
        assert f"<h2>{title}</h2>" in html
    text = Elements(html).text
    assert "You are quite right" in text and "we have known it" in text
    assert "2 trials failed: out of memory" in text
    assert "3,084" in text  # trials per hour: 80 in 93.4 s


def test_what_is_not_known_is_left_out() -> None:
    html = page(study(trials=(), best=None, retest=None, examples=(), notes=(), perplexity_ratio=None))
    assert "<h2>" not in html
    assert "None" not in Elements(html).text


def test_nothing_a_stranger_wrote_becomes_markup() -> None:
    html = page(hostile_study())
    elements = Elements(html)
    assert "script" not in elements.names and "img" not in elements.names
    assert HOSTILE[:25] in elements.text
    assert "<script>" not in html
    assert "\x00" not in html


def test_long_texts_are_cut() -> None:
    html = page(hostile_study())
    assert "y" * LONGEST_TEXT in html and "y" * (LONGEST_TEXT + 1) not in html


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "study.html"
    write_page(page(study()), path)
    html = path.read_text(encoding="utf-8")
    assert "http://" not in html and "https://" not in html and "<script" not in html
    assert "default-src &#x27;none&#x27;" in html
    assert [each.name for each in path.parent.iterdir()] == ["study.html"]


def test_too_few_questions_are_said_to_give_no_interval() -> None:
    alone = Interval(value=0.9, low=None, high=None)
    few = study(
        retest=Retest(num_questions=2, baseline=alone, steered=alone, difference=alone),
        perplexity_ratio=alone,
    )
    assert "no interval that can be trusted" in page(few) and "too few for an interval" in page(few)
