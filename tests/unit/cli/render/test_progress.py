"""Progress: rates from counts and a clock; without a terminal a line per tenth and per round of trials."""

from __future__ import annotations

import pytest

from flatout.cli.render.progress import Pace, Tally, counting, searching
from flatout.engines.steering.search.halved_search import Event


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


def test_a_count_gives_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("texts") as on_progress:
        for done in range(1, 1001):
            on_progress(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0] == "flatout: 1 of 1000 texts"
    assert lines[5].startswith("flatout: 500 of 1000 texts · ") and lines[5].endswith(" s left")
    assert lines[-1].startswith("flatout: 1000 of 1000 texts · ") and lines[-1].endswith(" texts/s")


def test_a_round_of_trials_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with searching() as (say, on_event):
        say("beginning")
        on_event(Event(kind="extracted", num_done=8, num_total=8))
        for kind in ("started", "resumed", "row", "row", "row", "rung", "pruned"):
            on_event(Event(kind=kind))  # type: ignore[arg-type]
        on_event(Event(kind="complete", value=0.75))
    assert capsys.readouterr().err.splitlines() == [
        "flatout: beginning",
        "flatout: 8 of 8 texts",
        "flatout: 2 trials · 1 pruned · 3 rows · best 0.750",
    ]


def test_a_tally_counts_what_others_ended_and_says_how_long_the_rest_takes() -> None:
    now_s = 0.0
    tally = Tally(clock=lambda: now_s)
    tally.count(Event(kind="round", num_done=20, num_total=100))
    for kind in ("started", "row", "row"):
        tally.count(Event(kind=kind))  # type: ignore[arg-type]
    assert tally.line() == "20 of 100 trials · 2 rows"
    now_s = 4.0
    tally.count(Event(kind="failed"))
    assert tally.is_round_over
    far = "21 of 100 trials · 4.00 s per trial · about 5 min left"
    assert tally.line() == f"{far} · 1 failed · 2 rows · 2.00 s per row"
    tally.count(Event(kind="round", num_done=28, num_total=100))  # seven of another worker
    assert tally.line().startswith("28 of 100 trials · 2 trials/s · about 36 s left")


def test_a_tally_keeps_the_best() -> None:
    tally = Tally()
    for value in (0.2, 0.9, 0.4):
        tally.count(Event(kind="complete", value=value))
    assert tally.best == 0.9
