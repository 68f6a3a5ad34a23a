"""Which adapters each row of a task runs under, for every routing, and what must be computed for all of them.

A routing gives each row weights over the adapters.  Most routings put the whole weight of a row on one
adapter, and many agree: a router that is right says what the oracle says.  So rows are gathered by the
adapter that any routing wants them under, and each such pair is computed once; only true mixtures (uniform,
top-k) need a pass of their own.

    N rows of one task   T adapters, one per task
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.evaluation.results import RoutingName
from flatout.engines.adapters.routing.router import Route

# Someone reads what these answer; of the others, the baselines, a metric is enough.
READ: tuple[RoutingName, ...] = ("oracle", "routed")
ALMOST_ONE = 1 - 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The weights of one task's rows under one routing."""

    routing: RoutingName
    adapter: int | None  # of "single"
    weights: Tensor  # [N, T], on the host

    def sole(self) -> list[int | None]:
        """Of each row the adapter that has its whole weight; None where several share it."""
        top = self.weights.max(dim=-1)
        return [
            adapter if weight > ALMOST_ONE else None
            for weight, adapter in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Rows to run under one adapter, and whether their answers are written out in words."""

    adapter: int
    rows: tuple[int, ...]
    write: bool


def plans_of(
    number: int,
    *,
    num_rows: int,
    num_tasks: int,
    routings: Sequence[RoutingName],
    singles: Sequence[int],
    route: Route | None,
    seed: int,
) -> list[Plan]:
    """The weights of the rows of task `number` under every routing; "end-to-end" has those of "routed"."""

    def under(adapters_N: Tensor) -> Tensor:
        return F.one_hot(adapters_N, num_tasks).float()

    found: list[tuple[RoutingName, int | None, Tensor]] = []
    for routing in routings:
        if routing == "oracle":
            found.append((routing, None, under(torch.full((num_rows,), number))))
        elif routing == "routed" and route is not None:
            found.append((routing, None, route.weights.cpu().float()))
        elif routing == "single":
            found += [(routing, single, under(torch.full((num_rows,), single))) for single in singles]
        elif routing == "uniform":
            found.append((routing, None, torch.full((num_rows, num_tasks), 1 / num_tasks)))
        elif routing == "random":
            drawn = torch.Generator().manual_seed(seed * 1000 + number)
            found.append((routing, None, under(torch.randint(num_tasks, (num_rows,), generator=drawn))))
    return [Plan(routing=routing, adapter=adapter, weights=weights) for routing, adapter, weights in found]


def wanted(plans: Sequence[Plan], *, write_all: bool) -> list[Wanted]:
    """Every adapter and the rows that any plan puts under it alone, each once.

    Writing an answer out costs a pass of the decoder per word, so it is done for the rows that someone reads,
    or for all.
    """
    rows: dict[int, set[int]] = {}
    read: dict[int, set[int]] = {}
    for plan in plans:
        for row, adapter in enumerate(plan.sole()):
            if adapter is not None:
                rows.setdefault(adapter, set()).add(row)
                if write_all or plan.routing in READ:
                    read.setdefault(adapter, set()).add(row)
    found = []
    for adapter in sorted(rows):
        written = read.get(adapter, set())
        for chosen, write in ((written, True), (rows[adapter] - written, False)):
            if chosen:
                found.append(Wanted(adapter=adapter, rows=tuple(sorted(chosen)), write=write))
    return found


def num_passes(plans: Sequence[Plan]) -> int:
    """Rows that go through the encoder, each as often as it does."""
    alone = sum(len(each.rows) for each in wanted(plans, write_all=False))
    return alone + sum(plan.sole().count(None) for plan in plans)
