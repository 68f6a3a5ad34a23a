"""Drawings hold every point, inside their frame."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.report.drawings import (
    describe,
    heat_map,
    intervals,
    show_interval,
    show_score,
    ticks,
    trade_off,
)
from flatout.engines.steering.report.grid import grid
from flatout.engines.steering.report.record import Interval, Retest
from tests.support.steering import hostile_study, study


def shares(markup: str, attribute: str) -> list[float]:
    return [float(value) for value in re.findall(rf'\b{attribute}="(-?[\d.]+)%"', markup)]


def test_the_heat_map_has_every_cell_and_one_winner() -> None:
    record = study()
    drawn = grid(record.trials, baseline=-0.1)
    assert drawn is not None
    markup = heat_map(drawn, baseline=-0.1, winner=record.best)
    root = ElementTree.fromstring(markup)
    kinds = [element.get("class") for element in root.iter("rect")]
    assert kinds.count("up") + kinds.count("down") == len(drawn.cells)
    assert kinds.count("winner") == 1
    assert all(0 <= share <= 100 for share in shares(markup, "x"))
    assert record.winner is not None and describe(record.winner) in markup


def test_the_trade_off_has_the_trials_whose_harm_is_known() -> None:
    record = study()
    markup = trade_off(record)
    assert markup is not None
    known = [trial for trial in record.trials if trial.perplexity_ratio is not None]
    assert markup.count("<circle") == len(known) > 10
    assert all(0 <= share <= 100 for share in shares(markup, "cx"))
    assert trade_off(hostile_study()) is None


def test_an_interval_that_holds_zero_is_not_certain() -> None:
    around = Interval(value=0.1, low=-0.1, high=0.3)
    unsure = Retest(num_questions=9, baseline=around, steered=around, difference=around)
    sure = Retest(
        num_questions=9, baseline=around, steered=around, difference=Interval(value=-0.5, low=-0.7, high=-0.3)
    )
    assert 'class="certain"' not in intervals(unsure)
    markup = intervals(sure)
    assert 'class="certain"' in markup and "-0.500 (-0.700 to -0.300)" in markup
    assert all(0 <= share <= 100 for name in ("x1", "x2", "cx") for share in shares(markup, name))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_hold_their_range(low: float, length: float) -> None:
    found = ticks(low, low + length)
    assert 2 <= len(found) <= 8
    slack = 1e-6 * (found[-1] - found[0])
    assert found[0] - slack <= low and low + length <= found[-1] + slack


def test_scores_keep_their_digits() -> None:
    assert [show_score(value) for value in (0.0, 0.5, -1.2345, 0.00012)] == ["0", "0.5", "-1.23", "1.2e-04"]
    one = Interval(value=0.5, low=0.25, high=0.75)
    assert show_interval(one) == "+0.500 (+0.250 to +0.750)"
    assert show_interval(one, signed=False) == "0.500 (0.250 to 0.750)"


@pytest.mark.parametrize("record", [study(), hostile_study()])
def test_drawings_are_well_formed(record: object) -> None:
    assert hasattr(record, "retest")
    ElementTree.fromstring(intervals(record.retest))
