"""The bar of phases and the whiskers: widths add up, intervals lie where the numbers say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from flatout.doctor.charts import phase_bar, whiskers
from flatout.doctor.report import phase_shares, readings
from tests.support import doctor as builders


def percent(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%"))


def test_the_phase_bar_fills_what_the_phases_account_for() -> None:
    evidence = builders.evidence()
    for device in (False, True):
        shares = phase_shares(evidence, device=device)
        rects = list(ElementTree.fromstring(phase_bar(shares, label="host")).iter("rect"))
        assert sum(percent(rect, "width") for rect in rects) == pytest.approx(
            100 * sum(shares.values()), abs=0.01
        )
        ends = [percent(rect, "x") + percent(rect, "width") for rect in rects]
        assert [percent(rect, "x") for rect in rects[1:]] == pytest.approx(ends[:-1], abs=0.01)


def test_a_dot_lies_inside_its_whisker_and_the_rules_stand_at_half_and_one() -> None:
    found = readings(builders.evidence())
    drawing = ElementTree.fromstring(whiskers(found))
    rows = [svg for svg in drawing.iter("svg") if svg.find("circle") is not None]
    assert len(rows) == len(found) == 2
    for reading, row in zip(found, rows, strict=True):
        dot = row.find("circle")
        interval = row.find("g[@class='interval']/line")
        same = row.find("line[@class='same']")
        half = row.find("line[@class='half-way']")
        assert dot is not None and interval is not None and same is not None and half is not None
        scale = percent(same, "x1")
        assert percent(dot, "cx") == pytest.approx(scale * reading.fraction, abs=0.01)
        assert percent(interval, "x1") == pytest.approx(scale * reading.fraction_low, abs=0.01)
        assert percent(interval, "x2") == pytest.approx(scale * reading.fraction_high, abs=0.01)
        assert percent(half, "x1") == pytest.approx(scale / 2, abs=0.01)
        assert percent(interval, "x2") <= 100
