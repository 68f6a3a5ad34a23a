"""Plans: weights that sum to one, and every pair of adapter and row asked for once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.evaluation.plans import READ, Plan, num_passes, plans_of, wanted
from flatout.engines.adapters.evaluation.results import ROUTINGS
from flatout.engines.adapters.routing.router import Route


def routes(rows: int, num_tasks: int, seed: int) -> Route:
    """Every other row under one adapter, the rest under two."""
    probabilities = torch.rand(rows, num_tasks, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    top = probabilities.topk(min(2, num_tasks))
    weights = torch.zeros(rows, num_tasks).scatter(1, top.indices, top.values)
    weights[::2] = torch.nn.functional.one_hot(top.indices[::2, 0], num_tasks).float()
    return Route(
        chosen=top.indices,
        weights=weights / weights.sum(dim=-1, keepdim=True),
        probabilities=probabilities,
        confidence=torch.ones(rows),
        is_sure=torch.ones(rows, dtype=torch.bool),
    )


def all_plans(number: int, rows: int, num_tasks: int, seed: int) -> list[Plan]:
    return plans_of(
        number,
        num_rows=rows,
        num_tasks=num_tasks,
        routings=ROUTINGS,
        singles=range(num_tasks),
        route=routes(rows, num_tasks, seed),
        seed=seed,
    )


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000), st.booleans(), st.data())
def test_every_pair_is_there_once_and_none_is_missing(
    rows: int, num_tasks: int, seed: int, write_all: bool, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, num_tasks - 1))
    plans = all_plans(number, rows, num_tasks, seed)
    asked = wanted(plans, write_all=write_all)
    pairs = [(each.adapter, row) for each in asked for row in each.rows]
    assert len(pairs) == len(set(pairs))
    needed = set()
    read = set()
    mixtures = 0
    for plan in plans:
        assert torch.allclose(plan.weights.sum(dim=-1), torch.ones(rows))
        for row in range(rows):
            used = [task for task in range(num_tasks) if plan.weights[row, task] > 0]
            if len(used) > 1:
                mixtures += 1
                continue
            needed.add((used[0], row))
            if plan.routing in READ:
                read.add((used[0], row))
    assert set(pairs) == needed
    assert {(each.adapter, row) for each in asked if each.write for row in each.rows} == (
        needed if write_all else read
    )
    assert num_passes(plans) == len(needed) + mixtures


def test_each_routing_is_what_its_name_says() -> None:
    plans = {(plan.routing, plan.adapter): plan for plan in all_plans(1, 40, 3, seed=0)}
    assert plans["oracle", None].sole() == [1] * 40
    assert plans["single", 2].sole() == [2] * 40
    assert plans["uniform", None].sole() == [None] * 40
    assert set(plans["random", None].sole()) == {0, 1, 2}
    assert plans["routed", None].sole().count(None) == 20
    assert len(plans) == len(ROUTINGS) - 1 + 2  # no plan of end-to-end, three single ones


def test_random_adapters_are_those_of_the_seed_and_the_task() -> None:
    first, again, other, task = (
        plans_of(number, num_rows=30, num_tasks=4, routings=["random"], singles=[], route=None, seed=seed)
        for number, seed in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first[0].weights, again[0].weights)
    assert not torch.equal(first[0].weights, other[0].weights)
    assert not torch.equal(first[0].weights, task[0].weights)


@pytest.mark.parametrize("routings", [("routed",), ("routed", "end-to-end")])
def test_without_a_route_nothing_is_routed(routings: tuple[str, ...]) -> None:
    chosen = [routing for routing in ROUTINGS if routing in routings]
    assert plans_of(0, num_rows=3, num_tasks=2, routings=chosen, singles=[], route=None, seed=0) == []
