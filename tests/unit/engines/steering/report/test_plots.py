"""The picture of a study, whole, sparse and hostile."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.steering.report.plots import plot_study
from flatout.engines.steering.report.record import Interval, Retest
from flatout.errors import BadInput
from tests.support.steering import hostile_study, study

ALONE = Interval(value=0.5, low=None, high=None)
FEW = study(retest=Retest(num_questions=2, baseline=ALONE, steered=ALONE, difference=ALONE))


def test_a_study_is_drawn_by_the_suffix_of_its_file(tmp_path: Path) -> None:
    assert plot_study(study(), tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = plot_study(study(), tmp_path / "b.svg").read_text()
    assert "<svg" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg"]


@pytest.mark.parametrize(
    "record", [hostile_study(), FEW, study(trials=(), best=None, retest=None, baseline_score=None)]
)
def test_odd_studies_are_drawn_too(record: object, tmp_path: Path) -> None:
    assert plot_study(record, tmp_path / "a.png").stat().st_size > 5000  # type: ignore[arg-type]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_study(study(), tmp_path / "a.pdf")
