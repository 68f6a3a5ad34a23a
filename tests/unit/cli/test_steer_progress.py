"""Progress without a terminal: a line for each tenth, a line for each round of trials."""

from __future__ import annotations

import pytest

from flatout.cli.steer_progress import Tally, counting, searching
from flatout.engines.steering.search import Event


def test_a_count_gives_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("texts") as on_progress:
        for done in range(1, 1001):
            on_progress(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "flatout: 1000 of 1000 texts"


def test_a_round_of_trials_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with searching() as (say, on_event):
        say("beginning")
        for kind in ("started", "resumed", "row", "row", "row", "rung", "pruned"):
            on_event(Event(kind=kind))  # type: ignore[arg-type]
        on_event(Event(kind="complete", value=0.75))
        on_event(Event(kind="started"))
        on_event(Event(kind="failed"))
    assert capsys.readouterr().err.splitlines() == [
        "flatout: beginning",
        "flatout: 2 of 2 trials begun have ended · 1 pruned · 3 rows · best 0.750",
        "flatout: 3 of 3 trials begun have ended · 1 pruned · 1 failed · 3 rows · best 0.750",
    ]


def test_a_tally_keeps_the_best() -> None:
    tally = Tally()
    for value in (0.2, 0.9, 0.4):
        tally.count(Event(kind="complete", value=value))
    assert tally.best == 0.9
