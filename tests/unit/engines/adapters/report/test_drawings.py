"""Drawings: every value is there once, at its place, and in words."""

from __future__ import annotations

import re

from flatout.engines.adapters.report.drawings import (
    MatrixCell,
    confidence_bars,
    confusion,
    dots,
    load_bars,
    matrix,
    reliability,
    show_exact_share,
    show_points,
    transfer,
)
from tests.support.adapters import TASKS, evaluation, hostile_report, quality, scores

SAME = (("oracle", 0.0, None), ("single", 0.0, "qa"), ("single", 0.0, "code"))


def test_dots_stand_at_their_points() -> None:
    drawn = dots(evaluation())
    assert drawn.count("<circle") == 5 * 6
    place = re.search(r'<circle cx="([\d.]+)%"[^>]*class="dot-oracle"><title>qa, oracle: 61\.5', drawn)
    assert place and abs(float(place.group(1)) - (2 + 0.96 * 61.5)) < 1e-3
    assert drawn.index("qa, oracle") < drawn.index("qa, routed")  # what is drawn last is seen


def test_what_was_not_run_has_no_dot() -> None:
    drawn = dots(evaluation(scores=(scores("oracle", 0),), heads_only=None))
    assert drawn.count("<circle") == 5 and "routed" not in drawn and "random" not in drawn


def test_points_beyond_the_scale_stay_on_it() -> None:
    found = hostile_report().evaluation
    assert found is not None
    places = [float(x) for x in re.findall(r'cx="([\d.]+)%"', dots(found))]
    assert places and all(0 <= place <= 100 for place in places)


def test_the_confusion_has_a_cell_per_pair() -> None:
    drawn = confusion(quality(), TASKS)
    assert drawn.count("<td") == 25 and drawn.count('class="own"') == 5
    assert 'title="37 of 500 rows of code went to translation"' in drawn and "7.4 %" in drawn
    assert "99.6 %" in drawn and drawn.count("100 %") == 1  # only what is perfect is called so


def test_colour_grows_with_the_value_and_nothing_has_none() -> None:
    cells = [
        [MatrixCell(text=str(value), title="", strength=value, is_own=False) for value in (0.0, 0.2, 0.9)]
    ]
    drawn = matrix(["row"], ["a", "b", "c"], cells, corner="")
    amounts = [int(found) for found in re.findall(r"--amount: (\d+)%", drawn)]
    assert len(amounts) == 2 and amounts[0] < amounts[1]


def test_transfer_needs_two_adapters() -> None:
    drawn = transfer(evaluation())
    assert drawn is not None and drawn.count("<td") == 25
    amounts = {
        title: int(amount)
        for title, amount in re.findall(r'title="(\w+ under the adapter of \w+)[^>]*--amount: (\d+)%', drawn)
    }
    assert amounts["code under the adapter of sentiment"] > amounts["sentiment under the adapter of code"]
    same = transfer(evaluation(scores=[scores(*each[:2], adapter=each[2]) for each in SAME]))
    assert same is not None and same.count("--amount") == 2  # where nothing is lost, only home is coloured
    assert transfer(evaluation(scores=(scores("single", 1.0, adapter="qa"),))) is None


def test_bars_of_confidence_add_up_and_mark_the_threshold() -> None:
    drawn = confidence_bars(quality())
    assert "threshold 0.6" in drawn
    assert "confidence 0.9 to 1.0: 2,026 rows" in drawn
    heights = [float(found) for found in re.findall(r'height="([\d.]+)" class="(?:right|wrong)"', drawn)]
    assert max(heights) <= 150 and min(heights) > 0
    assert "threshold" not in confidence_bars(quality(threshold=0.0))
    empty = confidence_bars(quality(bins=()))
    assert "<rect" not in empty


def test_reliability_lies_on_the_line_where_confidence_is_true() -> None:
    drawn = reliability(quality())
    assert drawn.count("<circle") == 10
    place = re.search(r'cy="([\d.]+)"[^>]*><title>2,026 rows', drawn)
    assert place and 0 < float(place.group(1)) < 15


def test_load_is_drawn_for_every_adapter() -> None:
    drawn = load_bars(quality())
    assert drawn.count('class="needed"') == 6 and drawn.count('class="used"') == 6  # five bars and a legend
    assert "20.0 % → 21.1 %" in drawn


def test_figures_in_words() -> None:
    assert [show_points(value) for value in (None, 0.04, 61.55)] == ["n/a", "0.0", "61.5"]
    assert [show_exact_share(value) for value in (None, 0.9996, 1)] == ["n/a", "100.0 %", "100 %"]
