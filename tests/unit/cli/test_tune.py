from __future__ import annotations

from pathlib import Path

import pytest

from flatout.cli import tune
from flatout.tuner.results.prescription import Prescription
from flatout.tuner.tune import Tried, Tuning
from flatout.tuner.verdict import Gain

GAIN = Gain(ratio=1.5, low=1.4, high=1.6, num_pairs=3, best=1.55)
NOISE = Gain(ratio=1.0, low=0.99, high=1.01, num_pairs=3, best=1.01)


def tried(name: str, answer: str, gain: Gain | None) -> Tried:
    return Tried(
        name=name,
        value=2,
        safety="exact",
        summary="",
        answer=answer,
        reason="because",
        gain=gain,  # type: ignore[arg-type]
    )


def test_every_treatment_is_shown_with_its_answer_and_its_gain(capsys: pytest.CaptureFixture[str]) -> None:
    done = Tuning(
        tried=(tried("loader-workers", "kept", GAIN), tried("threads", "failed", None)),
        noise=NOISE,
        reproducible=True,
        total=GAIN,
        prescription=Prescription(command=("train.py",), treatments=()),
        num_trials=20,
        step_s=0.1,
    )
    tune._show(done, Path("flatout.toml"))
    shown = capsys.readouterr().out
    assert "loader-workers 2" in shown and "1.50× [1.40, 1.60]" in shown and "failed" in shown
    assert "The job against itself: 0.99× to 1.01× over 3 pairs" in shown and "flatout run" in shown


def test_a_job_that_nothing_makes_faster_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    done = Tuning(
        tried=(),
        noise=NOISE,
        reproducible=True,
        total=None,
        prescription=Prescription(command=("train.py",), treatments=()),
        num_trials=7,
        step_s=0.1,
    )
    tune._show(done, Path("flatout.toml"))
    assert "Nothing pays" in capsys.readouterr().out
