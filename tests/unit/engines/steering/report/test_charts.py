"""Charts of a study hold every point, inside their frame."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.report.charts import (
    MOST_COLUMNS,
    group_trials,
    heat_map,
    intervals,
    plot_study,
    show_score,
    trade_off,
)
from flatout.engines.steering.report.record import Interval, Retest, StudyRecord, TrialRecord
from flatout.ground.errors import BadInput
from tests.support.steering import hostile_study, study

ALONE = Interval(value=0.5, low=None, high=None)
FEW = study(retest=Retest(num_questions=2, baseline=ALONE, steered=ALONE, difference=ALONE))


def trial(number: int, *, layer: int, strength: float, score: float | None) -> TrialRecord:
    return TrialRecord(
        number=number,
        layer=layer,
        method="pca",
        strength=strength,
        where="all",
        state="complete",
        score=score,
    )


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(-50, 50), st.floats(-9, 9)), min_size=1, max_size=60))
def test_every_trial_lies_in_its_cell(drawn: list[tuple[int, float, float]]) -> None:
    trials = [trial(i, layer=a, strength=b, score=c) for i, (a, b, c) in enumerate(drawn)]
    found = group_trials(trials)
    assert found is not None
    numbers = [each.number for several in found.trials.values() for each in several]
    assert sorted(numbers) == list(range(len(trials)))
    assert 1 <= len(found.edges) - 1 <= MOST_COLUMNS
    assert list(found.edges) == sorted(set(found.edges))
    for (layer, column), several in found.trials.items():
        for each in several:
            assert found.edges[column] - 1e-9 <= each.strength <= found.edges[column + 1] + 1e-9
            assert each.layer == layer
        assert found.best((layer, column)).score == max(each.score or 0.0 for each in several)
    if found.edges[0] < 0 < found.edges[-1]:
        assert 0 in found.edges


def test_few_questions_do_not_beat_many() -> None:
    lucky = dataclasses.replace(trial(0, layer=1, strength=1.0, score=0.9), num_questions=2)
    known = dataclasses.replace(trial(1, layer=1, strength=1.0, score=0.5), num_questions=20)
    found = group_trials([lucky, known])
    assert found is not None
    ((place, several),) = found.trials.items()
    assert found.best(place) == known and len(several) == 2
    chart, reach = heat_map(study(trials=(lucky, known), baseline_score=0.1)) or (None, 0.0)
    assert chart is not None and reach == pytest.approx(0.4)


def test_trials_without_a_score_are_no_cell() -> None:
    assert group_trials([trial(0, layer=1, strength=1.0, score=None)]) is None
    assert group_trials([]) is None
    assert heat_map(study(trials=())) is None


def test_the_heat_map_has_every_cell_and_one_winner() -> None:
    record = study()
    grid, drawn = group_trials(record.trials), heat_map(record)
    assert grid is not None and drawn is not None
    chart, _ = drawn
    cells = [cell for line in chart.cells for cell in line if cell is not None]
    assert len(cells) == len(grid.trials) and {cell.colour for cell in cells} == {"up", "down"}
    (winner,) = (cell for cell in cells if cell.is_outlined)
    assert record.winner is not None and record.winner.describe() in winner.title
    assert all(0 < cell.strength <= 1 for cell in cells)
    assert chart.rows == tuple(
        str(layer) for layer in sorted({each[0] for each in grid.trials}, reverse=True)
    )


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
    assert one.show() == "+0.500 (+0.250 to +0.750)"
    assert one.show(signed=False) == "0.500 (0.250 to 0.750)"


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
