"""Far, fast and long: from counts and a clock."""

from __future__ import annotations

from flatout.cli.pace import Pace


def test_the_rate_is_that_since_the_first_count() -> None:
    now_s = 100.0
    pace = Pace("texts", clock=lambda: now_s)
    assert pace.parts(40, 100) == ["40 of 100 texts"]
    now_s = 110.0
    assert pace.parts(60, 100) == ["60 of 100 texts", "2 texts/s", "about 20 s left"]
    assert pace.parts(100, 100) == ["100 of 100 texts", "6 texts/s"]
    assert pace.parts(25_040, None) == ["25040 texts", "2500 texts/s"]
    now_s = 180.0
    assert pace.parts(41, None) == ["41 texts", "80.0 s per text"]


def test_nothing_is_said_of_a_rate_that_is_not_known() -> None:
    pace = Pace("rows", clock=lambda: 5.0)
    assert pace.parts(0, 10) == ["0 of 10 rows"]
    assert pace.parts(3, 10) == ["3 of 10 rows"]
