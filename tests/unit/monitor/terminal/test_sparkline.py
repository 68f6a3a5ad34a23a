"""A curve in one row: time decides the column, unknown is a blank, zero is a mark."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.terminal.sparkline import MARKS, PLAIN_MARKS, sparkline


def points(*values: float | None, start_s: float = 1000.0) -> list[tuple[float, float | None]]:
    return [(start_s + second, value) for second, value in enumerate(values)]


def test_values_become_marks_and_unknown_a_blank() -> None:
    assert sparkline(points(0.0, None, 0.5, 1.0), width=4, span_s=4, top=1.0) == "▁ ▅█"


def test_a_gap_in_time_is_a_gap_in_the_curve() -> None:
    drawn = sparkline([(1000.0, 1.0), (1003.0, 1.0)], width=4, span_s=4, top=1.0)
    assert drawn == "█  █"


def test_the_highest_value_fills_a_curve_without_a_top() -> None:
    assert sparkline(points(1.0, 2.0, 4.0), width=3, span_s=3) == "▃▅█"
    assert sparkline(points(0.0, 0.0), width=2, span_s=2) == "▁▁"


def test_what_lies_before_the_span_is_not_drawn_and_short_curves_begin_late() -> None:
    assert sparkline(points(1.0, 1.0, 0.0), width=2, span_s=2, top=1.0) == "█▁"
    assert sparkline(points(1.0), width=3, span_s=3, top=1.0) == "  █"
    assert sparkline([], width=3, span_s=3) == "   "


def test_a_curve_moves_as_a_whole() -> None:
    """A second later every column but the new one is the one beside it."""
    values = [0.1, 0.9, 0.4, 0.7, 0.2, 0.8]
    before = sparkline(points(*values[:5]), width=5, span_s=5, top=1.0)
    after = sparkline(points(*values), width=5, span_s=5, top=1.0)
    assert after[:4] == before[1:]


def test_values_that_are_no_numbers_are_unknown() -> None:
    assert sparkline(points(float("nan"), float("inf"), 1.0), width=3, span_s=3, top=1.0) == "  █"


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=50),
    st.integers(0, 80),
    st.sampled_from([MARKS, PLAIN_MARKS]),
)
def test_it_always_has_its_width(values: list[float | None], width: int, marks: str) -> None:
    drawn = sparkline(points(*values), width=width, span_s=60, marks=marks)
    assert len(drawn) == width
    assert set(drawn) <= {" ", *marks}
