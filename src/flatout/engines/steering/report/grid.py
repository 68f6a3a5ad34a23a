"""Trials as a grid of layer by strength.

A search draws strengths from a line, so no two trials share one: the line is cut into columns of equal width
that keep zero on a border, and the best trial of a cell stands for it: of those asked the most questions the
one with the highest score, since a trial that was asked few may score high by luck.  The colour of a cell is
its distance from the unsteered model, in both directions alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.engines.steering.report.record import TrialRecord
from flatout.page.scales import round_step

MOST_COLUMNS = 13
FINEST = 1e-6  # strengths that differ by less are one strength


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The trials of one layer in one column of strengths, by their best."""

    row: int
    column: int
    best: TrialRecord
    numbers: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Layers up, strengths across; `edges` has one more entry than there are columns."""

    layers: tuple[int, ...]
    edges: tuple[float, ...]
    cells: tuple[Cell, ...]
    reach: float  # the largest distance of a cell from the baseline

    @property
    def num_columns(self) -> int:
        return len(self.edges) - 1


def grid(trials: Sequence[TrialRecord], *, baseline: float) -> Grid | None:
    """The grid of all trials that have a score; None where there is none."""
    scored = [trial for trial in trials if trial.score is not None and math.isfinite(trial.strength)]
    if not scored:
        return None
    layers = tuple(sorted({trial.layer for trial in scored}))
    edges = _edges([trial.strength for trial in scored])
    found: dict[tuple[int, int], list[TrialRecord]] = {}
    for trial in scored:
        place = (layers.index(trial.layer), _column(trial.strength, edges))
        found.setdefault(place, []).append(trial)
    cells = tuple(
        Cell(
            row=row,
            column=column,
            best=max(several, key=_worth),
            numbers=frozenset(trial.number for trial in several),
        )
        for (row, column), several in sorted(found.items())
    )
    reach = max(abs(_score(cell.best) - baseline) for cell in cells)
    return Grid(layers=layers, edges=edges, cells=cells, reach=reach)


def _score(trial: TrialRecord) -> float:
    return -math.inf if trial.score is None else trial.score


def _worth(trial: TrialRecord) -> tuple[int, float]:
    return trial.num_questions or 0, _score(trial)


def _edges(strengths: Sequence[float]) -> tuple[float, ...]:
    """Borders of columns, multiples of one round step, around all strengths."""
    low, high = min(strengths), max(strengths)
    wide = (high - low) / (MOST_COLUMNS - 2) if high - low > FINEST else abs(high)
    step = round_step(wide if wide > FINEST else 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    if high >= last * step:
        last += 1
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def _column(strength: float, edges: Sequence[float]) -> int:
    """The column whose borders hold the strength; the last one holds its right border too."""
    inside = sum(edge <= strength for edge in edges) - 1
    return min(max(inside, 0), len(edges) - 2)
