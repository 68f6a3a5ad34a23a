from __future__ import annotations

from flatout.tuner.results.outcome import NO_TIME, Answer, Tried, Tuning
from flatout.tuner.results.prescription import Prescription
from flatout.tuner.verdict import Gain

NOISE = Gain(ratio=1.0, low=0.99, high=1.01, num_pairs=3, best=1.01)


def tuning(*answers: tuple[Answer, str]) -> Tuning:
    """A tuning in which nothing was kept."""
    return Tuning(
        tried=tuple(
            Tried(name="threads", value=2, safety="exact", summary="", answer=answer, reason=reason)
            for answer, reason in answers
        ),
        noise=NOISE,
        reproducible=True,
        total=None,
        prescription=Prescription(command=("train.py",), treatments=()),
        num_trials=7,
        step_s=0.1,
    )


def test_it_is_said_why_nothing_was_kept() -> None:
    assert "as fast as these treatments can make it" in tuning(("no gain", "x")).why_nothing()
    assert "no time for 1 of 2" in tuning(("no gain", "x"), ("not tried", NO_TIME)).why_nothing()
    found = tuning(("no gain", "x"), ("wrong numbers", "x"), ("failed", "x"), ("failed", "y")).why_nothing()
    assert "Of 4 treatments: 1 with other numbers, 2 failed" in found and "calmer" not in found
    assert tuning(("not tried", "it does not suit")).why_nothing() == "Nothing was tried; see why above."
    assert "A calmer machine" in tuning(("undecided", "x")).why_nothing()
    assert str(tuning(("no gain", "x")).tried[0]) == "threads 2"
