"""Figures of a router against the same figures counted row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.evaluation.results import RoutingQuality
from flatout.engines.adapters.routing.quality import NUM_BINS, calibration_error, confidence_bins, judge
from flatout.engines.adapters.routing.router import Decider, Route, Router
from flatout.ground.errors import BadInput


def judged(route: Route, tasks: torch.Tensor, names: list[str]) -> RoutingQuality:
    decider = Decider(router=Router(4, num_tasks=len(names), hidden=()), threshold=0.5)
    return judge(route, tasks_N=tasks, names=names, decider=decider)


def random_route(rows: int, num_tasks: int, seed: int) -> tuple[Route, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(rows, num_tasks, generator=drawn)).softmax(dim=-1)
    confidence = torch.rand(rows, generator=drawn)
    route = Route(
        chosen=probabilities.argsort(dim=-1, descending=True)[:, :1],
        weights=probabilities,
        probabilities=probabilities,
        confidence=confidence,
        is_sure=confidence >= 0.5,
    )
    return route, torch.randint(num_tasks, (rows,), generator=drawn)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 10**6))
def test_every_figure_is_what_counting_gives(rows: int, num_tasks: int, seed: int) -> None:
    route, tasks = random_route(rows, num_tasks, seed)
    names = [f"task{number}" for number in range(num_tasks)]
    found = judged(route, tasks, names)
    confusion = [[0] * num_tasks for _ in names]
    entropy = right = sure = sure_right = 0.0
    for row in range(rows):
        chosen, task = int(route.chosen[row, 0]), int(tasks[row])
        confusion[task][chosen] += 1
        right += chosen == task
        entropy -= sum(p * math.log(p) for p in route.probabilities[row].tolist() if p > 0)
        if route.confidence[row] >= 0.5:
            sure += 1
            sure_right += chosen == task
    assert found.confusion == tuple(tuple(line) for line in confusion)
    assert found.accuracy_share == pytest.approx(right / rows)
    assert found.entropy_nats == pytest.approx(entropy / rows, abs=1e-5)
    assert found.sure_share == pytest.approx(sure / rows)
    assert found.sure_accuracy_share == (pytest.approx(sure_right / sure) if sure else None)
    for number, name in enumerate(names):
        needed = sum(confusion[number])
        expected = confusion[number][number] / needed if needed else None
        assert found.accuracy_by_task[name] == (None if expected is None else pytest.approx(expected))
        assert found.needed_share[name] == pytest.approx(needed / rows)
        assert found.used_share[name] == pytest.approx(float(route.weights[:, number].mean()), abs=1e-6)
    assert sum(found.used_share.values()) == pytest.approx(1, abs=1e-5)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_bins_hold_every_row_once(rows: list[tuple[float, bool]]) -> None:
    confidence = torch.tensor([sure for sure, _ in rows], dtype=torch.float64)
    is_right = torch.tensor([right for _, right in rows])
    bins = confidence_bins(confidence, is_right)
    assert sum(each.num_rows for each in bins) == len(rows)
    assert sum(each.num_right for each in bins) == sum(right for _, right in rows)
    for each in bins:
        if each.mean_confidence is not None:
            assert each.low - 1e-9 <= each.mean_confidence <= each.high + 1e-9
    assert 0 <= calibration_error(bins) <= 1


def test_confidence_that_is_true_has_no_error() -> None:
    confidence = torch.tensor([0.75] * 4 + [0.25] * 4, dtype=torch.float64)
    is_right = torch.tensor([True, True, True, False, True, False, False, False])
    assert calibration_error(confidence_bins(confidence, is_right)) == pytest.approx(0)
    assert calibration_error(confidence_bins(1 - confidence, is_right)) == pytest.approx(0.5)


def test_balance_is_one_for_even_use_and_zero_for_one_adapter() -> None:
    route, tasks = random_route(9, 3, seed=0)
    for weights, expected in ((torch.full((9, 3), 1 / 3), 1.0), (torch.eye(3)[[0] * 9], 0.0)):
        changed = Route(
            chosen=route.chosen,
            weights=weights,
            probabilities=route.probabilities,
            confidence=route.confidence,
            is_sure=route.is_sure,
        )
        found = judged(changed, tasks, ["a", "b", "c"])
        assert found.balance == pytest.approx(expected)
    alone, none = random_route(4, 1, seed=0)
    assert judged(alone, none, ["a"]).balance is None
    assert len(judged(alone, none, ["a"]).bins) == NUM_BINS


def test_no_row_is_no_figure() -> None:
    route, tasks = random_route(0, 2, seed=0)
    with pytest.raises(BadInput, match="at least one row"):
        judged(route, tasks, ["a", "b"])
