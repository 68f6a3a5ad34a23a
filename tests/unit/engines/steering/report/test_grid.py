"""Every scored trial lies in one cell, inside its borders, and zero is a border."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.report.grid import MOST_COLUMNS, grid
from flatout.engines.steering.report.record import TrialRecord


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
    found = grid(trials, baseline=0.0)
    assert found is not None
    assert sorted(number for cell in found.cells for number in cell.numbers) == list(range(len(trials)))
    assert 1 <= found.num_columns <= MOST_COLUMNS
    assert list(found.edges) == sorted(set(found.edges))
    for cell in found.cells:
        inside = found.edges[cell.column] - 1e-9 <= cell.best.strength <= found.edges[cell.column + 1] + 1e-9
        assert inside and found.layers[cell.row] == cell.best.layer
    best = max(score for _, _, score in drawn)
    assert max(cell.best.score or -9 for cell in found.cells) == pytest.approx(best) or best == 0
    if found.edges[0] < 0 < found.edges[-1]:
        assert 0 in found.edges


def test_few_questions_do_not_beat_many() -> None:
    lucky = dataclasses.replace(trial(0, layer=1, strength=1.0, score=0.9), num_questions=2)
    known = dataclasses.replace(trial(1, layer=1, strength=1.0, score=0.5), num_questions=20)
    found = grid([lucky, known], baseline=0.1)
    assert found is not None and found.cells[0].best == known


def test_trials_without_a_score_are_no_cell() -> None:
    assert grid([trial(0, layer=1, strength=1.0, score=None)], baseline=0.0) is None
    assert grid([], baseline=0.0) is None


def test_the_best_of_a_cell_stands_for_it() -> None:
    trials = [trial(0, layer=1, strength=1.0, score=0.2), trial(1, layer=1, strength=1.0, score=0.5)]
    found = grid(trials, baseline=0.1)
    assert found is not None
    (cell,) = found.cells
    assert (cell.best.number, cell.numbers) == (1, {0, 1})
    assert found.reach == pytest.approx(0.4)
