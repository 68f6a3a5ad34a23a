"""Charts of a study hold every point, inside their frame."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.steering.report.charts import (
    describe,
    heat_map,
    intervals,
    plot_study,
    show_interval,
    show_score,
    trade_off,
)
from flatout.engines.steering.report.grid import grid
from flatout.engines.steering.report.record import Interval, Retest, StudyRecord
from flatout.errors import BadInput
from tests.support.steering import hostile_study, study

ALONE = Interval(value=0.5, low=None, high=None)
FEW = study(retest=Retest(num_questions=2, baseline=ALONE, steered=ALONE, difference=ALONE))


def test_the_heat_map_has_every_cell_and_one_winner() -> None:
    record = study()
    drawn = grid(record.trials, baseline=-0.1)
    assert drawn is not None
    chart = heat_map(drawn, baseline=-0.1, winner=record.best)
    cells = [cell for line in chart.cells for cell in line if cell is not None]
    assert len(cells) == len(drawn.cells) and {cell.colour for cell in cells} == {"up", "down"}
    (winner,) = (cell for cell in cells if cell.is_outlined)
    assert record.winner is not None and describe(record.winner) in winner.title
    assert all(0 < cell.strength <= 1 for cell in cells)
    assert chart.rows == tuple(str(layer) for layer in reversed(drawn.layers))


def test_the_trade_off_has_the_trials_whose_harm_is_known() -> None:
    record = study()
    chart = trade_off(record)
    assert chart is not None
    known = [trial for trial in record.trials if trial.perplexity_ratio is not None]
    dots = [mark for mark in chart.marks if mark.shape == "dot"]
    assert len(dots) == len(known) > 10
    assert all(0 <= dot.at[0][0] <= 1 and 0 <= dot.at[0][1] <= chart.height for dot in dots)
    assert trade_off(hostile_study()) is None


def test_an_interval_that_holds_zero_is_not_certain() -> None:
    around = Interval(value=0.1, low=-0.1, high=0.3)
    unsure = Retest(num_questions=9, baseline=around, steered=around, difference=around)
    sure = Retest(
        num_questions=9, baseline=around, steered=around, difference=Interval(value=-0.5, low=-0.7, high=-0.3)
    )
    for retest, colour in ((unsure, "ink"), (sure, "up")):
        last = intervals(retest).rows[-1]
        assert last.marks[-1].colour == colour
        assert all(0 <= x <= 1 for mark in last.marks for x, _ in mark.at)
    assert intervals(sure).rows[-1].figure == "-0.500 (-0.700 to -0.300)"
    assert [
        sum(mark.shape == "line" for mark in row.marks) for row in intervals(FEW.retest or sure).rows
    ] == [2] * 3


def test_scores_keep_their_digits() -> None:
    assert [show_score(value) for value in (0.0, 0.5, -1.2345, 0.00012)] == ["0", "0.5", "-1.23", "1.2e-04"]
    one = Interval(value=0.5, low=0.25, high=0.75)
    assert show_interval(one) == "+0.500 (+0.250 to +0.750)"
    assert show_interval(one, signed=False) == "0.500 (0.250 to 0.750)"


def test_a_study_is_drawn_by_the_suffix_of_its_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert plot_study(study(), tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in plot_study(study(), tmp_path / "b.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg"]
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_study(study(), tmp_path / "a.pdf")


@pytest.mark.parametrize(
    "record",
    [hostile_study(), FEW, study(trials=(), best=None, retest=None, baseline_score=None)],
    ids=["hostile", "few questions", "no trials"],
)
def test_odd_studies_are_drawn_too(record: StudyRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert plot_study(record, tmp_path / "a.png").stat().st_size > 5000
