"""How well a router distinguishes tasks: accuracy, confusion, entropy, load, and how true its confidence is.

Confidence is true if, of all rows at 0.8, eight in ten are routed rightly.  The calibration error is the mean
distance from that, over bins of equal width, each weighted by its rows.

    N rows   T tasks, and as many adapters
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from flatout.engines.adapters.evaluation.results import ConfidenceBin, RoutingQuality
from flatout.engines.adapters.routing.router import Decider, Route
from flatout.ground.errors import BadInput

NUM_BINS = 10


def judge_routes(routes: Mapping[str, Route], decider: Decider) -> RoutingQuality:
    """Judge a router over all tasks; `routes` are those of each task's rows, in the order of the adapters."""
    found = list(routes.values())
    whole = Route(
        **{each.name: torch.cat([getattr(route, each.name) for route in found]) for each in fields(Route)}
    )
    counts = torch.tensor([len(route.chosen) for route in found])
    tasks_N = torch.arange(len(found)).repeat_interleave(counts)
    return judge(whole, tasks_N=tasks_N, names=list(routes), decider=decider)


def judge(route: Route, *, tasks_N: Tensor, names: Sequence[str], decider: Decider) -> RoutingQuality:
    """Judge the routes of rows whose tasks are known."""
    num_tasks, num_rows = len(names), len(tasks_N)
    if num_rows == 0:
        raise BadInput("a router is judged on at least one row, 0 were given")
    first_N = route.chosen[:, 0].cpu()
    tasks_N = tasks_N.cpu()
    is_right_N = first_N == tasks_N
    confusion_TT = torch.bincount(tasks_N * num_tasks + first_N, minlength=num_tasks**2)
    confusion_TT = confusion_TT.view(num_tasks, num_tasks)
    needed_T = confusion_TT.sum(dim=1)
    right_T = confusion_TT.diagonal()
    probabilities_NT = route.probabilities.cpu().double()
    used_T = route.weights.cpu().double().mean(dim=0)
    bins = confidence_bins(route.confidence.cpu().double(), is_right_N)
    is_sure_N = route.is_sure.cpu()
    return RoutingQuality(
        accuracy_share=is_right_N.double().mean().item(),
        accuracy_by_task={
            name: right / needed if needed else None
            for name, right, needed in zip(names, right_T.tolist(), needed_T.tolist(), strict=True)
        },
        confusion=tuple(tuple(row) for row in confusion_TT.tolist()),
        entropy_nats=torch.special.entr(probabilities_NT).sum(dim=-1).mean().item(),
        needed_share=dict(zip(names, (needed_T.double() / num_rows).tolist(), strict=True)),
        used_share=dict(zip(names, used_T.tolist(), strict=True)),
        balance=_balance(used_T),
        calibration_error=calibration_error(bins),
        bins=bins,
        threshold=decider.threshold,
        top_k=decider.top_k,
        fallback=decider.fallback,
        sure_share=is_sure_N.double().mean().item(),
        sure_accuracy_share=is_right_N[is_sure_N].double().mean().item() if is_sure_N.any() else None,
        temperature=decider.router.temperature.item(),
    )


def confidence_bins(confidence_N: Tensor, is_right_N: Tensor) -> tuple[ConfidenceBin, ...]:
    """Group rows by their confidence; the last bin holds a confidence of exactly one."""
    which_N = (confidence_N * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    rows = torch.bincount(which_N, minlength=NUM_BINS).tolist()
    right = torch.bincount(which_N[is_right_N], minlength=NUM_BINS).tolist()
    sums = torch.bincount(which_N, weights=confidence_N, minlength=NUM_BINS).tolist()
    return tuple(
        ConfidenceBin(
            low=number / NUM_BINS,
            high=(number + 1) / NUM_BINS,
            num_rows=rows[number],
            num_right=right[number],
            mean_confidence=sums[number] / rows[number] if rows[number] else None,
        )
        for number in range(NUM_BINS)
    )


def calibration_error(bins: Sequence[ConfidenceBin]) -> float:
    num_rows = sum(each.num_rows for each in bins)
    gaps = (
        each.num_rows * abs(each.mean_confidence - each.right_share)
        for each in bins
        if each.mean_confidence is not None and each.right_share is not None
    )
    return sum(gaps) / num_rows


def _balance(used_T: Tensor) -> float | None:
    """Return the entropy of use over its largest value; None for a single adapter."""
    if len(used_T) < 2:
        return None
    return float(torch.special.entr(used_T).sum()) / math.log(len(used_T))
