"""Charts of an adapters run: every value is there once, at its place, and in words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flatout.engines.adapters.report.charts import (
    LINE_COLOURS,
    confidence_bars,
    confusion,
    draw_learning,
    load_bars,
    loss_line,
    plot_report,
    reliability,
    routing_line,
    score_dots,
    show_exact_share,
    show_points,
    transfer,
    validation_line,
)
from flatout.engines.adapters.report.run_report import RunReport
from flatout.engines.adapters.training.records import StepRecord
from flatout.ground.errors import BadInput
from flatout.page.charts import Mark, Matrix
from tests.support.adapters import TASKS, evaluation, hostile_report, quality, report, scores

SAME = (("oracle", 0.0, None), ("single", 0.0, "qa"), ("single", 0.0, "code"))


def dots_of(marks: tuple[Mark, ...]) -> list[Mark]:
    return [mark for mark in marks if mark.shape == "dot"]


def coloured(chart: Matrix) -> dict[str, float]:
    """How much colour the cells have that have some, by the words of their titles."""
    return {cell.title: cell.strength for line in chart.cells for cell in line if cell and cell.strength > 0}


def test_dots_stand_at_their_points() -> None:
    chart = score_dots(evaluation())
    assert [row.name for row in chart.rows] == list(TASKS)
    (qa,) = (row for row in chart.rows if row.name == "qa")
    found = dots_of(qa.marks)
    assert len(found) == 6
    oracle = next(dot for dot in found if dot.title.startswith("qa, oracle: 61.5"))
    assert oracle.at[0][0] == pytest.approx(0.615)
    titles = [dot.title for dot in found]
    assert titles.index(oracle.title) < [title.split(":")[0] for title in titles].index("qa, routed")


def test_what_was_not_run_has_no_dot() -> None:
    chart = score_dots(evaluation(scores=(scores("oracle", 0),), heads_only=None))
    assert [len(dots_of(row.marks)) for row in chart.rows] == [1] * 5
    assert [key.name for key in chart.legend] == ["oracle"]


def test_points_beyond_the_scale_stay_on_it() -> None:
    found = hostile_report().evaluation
    assert found is not None
    places = [dot.at[0][0] for row in score_dots(found).rows for dot in dots_of(row.marks)]
    assert places and all(0 <= place <= 1 for place in places)


def test_the_confusion_has_a_cell_per_pair() -> None:
    chart = confusion(quality(), TASKS)
    cells = [cell for line in chart.cells for cell in line if cell is not None]
    assert len(cells) == 25 and sum(cell.colour == "own" for cell in cells) == 5
    by_title = {cell.title: cell.text for cell in cells}
    assert by_title["37 of 500 rows of code went to translation"] == "7.4 %"
    assert [cell.text for cell in cells].count("100 %") == 1  # only what is perfect is called so
    assert "99.6 %" in by_title.values()


def test_transfer_needs_two_adapters() -> None:
    chart = transfer(evaluation())
    assert chart is not None and sum(len(line) for line in chart.cells) == 25
    amounts = {title.partition(":")[0]: strength for title, strength in coloured(chart).items()}
    assert amounts["code under the adapter of sentiment"] > amounts["sentiment under the adapter of code"]
    same = transfer(evaluation(scores=[scores(*each[:2], adapter=each[2]) for each in SAME]))
    assert same is not None and len(coloured(same)) == 2  # where nothing is lost, only home is coloured
    assert transfer(evaluation(scores=(scores("single", 1.0, adapter="qa"),))) is None


def test_bars_of_confidence_add_up_and_mark_the_threshold() -> None:
    chart = confidence_bars(quality())
    titles = [mark.title for mark in chart.marks]
    assert "threshold 0.6" in titles
    assert any(title.startswith("confidence 0.9 to 1.0: 2,026 rows") for title in titles)
    heights = [mark.at[1][1] - mark.at[0][1] for mark in chart.marks if mark.shape == "rect"]
    assert max(heights) <= 130 and min(heights) > 0
    assert not any("threshold" in mark.title for mark in confidence_bars(quality(threshold=0.0)).marks)
    assert not any(mark.shape == "rect" for mark in confidence_bars(quality(bins=())).marks)


def test_reliability_lies_on_the_line_where_confidence_is_true() -> None:
    found = dots_of(reliability(quality()).marks)
    assert len(found) == 10
    (largest,) = (dot for dot in found if dot.title.startswith("2,026 rows"))
    assert 8 <= largest.at[0][1] < 21 and largest.size == max(dot.size for dot in found)


def test_load_is_drawn_for_every_adapter() -> None:
    chart = load_bars(quality())
    assert [[mark.colour for mark in row.marks] for row in chart.rows] == [["rest", "own"]] * 5
    assert "20.0 % → 21.1 %" in [row.figure for row in chart.rows]


def test_figures_in_words() -> None:
    assert [show_points(value) for value in (None, 0.04, 61.55)] == ["n/a", "0.0", "61.5"]
    assert [show_exact_share(value) for value in (None, 0.9996, 1)] == ["n/a", "100.0 %", "100 %"]


def test_lines_hold_what_is_known() -> None:
    records = [
        StepRecord(phase="phase1", step=1, losses={"qa": 2.0}),
        StepRecord(phase="phase1", step=2, losses={"qa": None}, validation={"qa": {"f1": 40.0}}),
        StepRecord(phase="phase1", step=3, losses={"qa": math.inf}, routing={"accuracy": 0.5}),
    ]
    assert loss_line(records, "qa", name="loss").known == [(1, 2.0)]
    assert validation_line(records, "qa", "f1", name="f1").known == [(2, 40.0)]
    assert routing_line(records, "accuracy", name="accuracy").known == [(3, 0.5)]
    assert draw_learning([loss_line(records, "code", name="loss")]) is None


def test_a_log_of_losses_that_are_zero_or_below_is_drawn() -> None:
    records = [
        StepRecord(phase="phase2", step=i, losses={"entropy": v}) for i, v in enumerate((-0.1, 0.0, 3.0))
    ]
    chart = draw_learning([loss_line(records, "entropy", name="entropy")], is_logarithmic=True)
    assert chart is not None and chart.legend[0].value == "3"


@pytest.mark.parametrize(
    "run",
    [
        report(),
        report(evaluation=None),
        report(records=(), evaluation=evaluation(scores=(scores("oracle", 0),), routing=None)),
        hostile_report(),
    ],
    ids=["full", "not evaluated", "no log, no router", "hostile"],
)
def test_every_run_has_a_picture(run: RunReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = plot_report(run, tmp_path / "deep" / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in path.parent.iterdir()] == ["run.png"]


def test_the_suffix_decides_the_kind(tmp_path: Path) -> None:
    text = plot_report(report(), tmp_path / "run.svg").read_text(encoding="utf-8")
    assert "<svg" in text and "routing accuracy" in text and len(LINE_COLOURS) == len(set(LINE_COLOURS))
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_report(report(), tmp_path / "run.pdf")
