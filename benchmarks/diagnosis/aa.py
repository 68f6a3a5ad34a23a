"""The A/A arm: steps as they are under another name, so that whatever is measured of them is chance."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flatout.measure.arms.arm import Same
from flatout.measure.evidence import Counterfactual
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import Observer, ObserverOptions


def intervals_of_nothing(
    num_runs: int, *, known: Sequence[Sequence[float]] = (), seconds: float = 30.0
) -> dict[str, Any]:
    """How many of the intervals of an arm that changes nothing hold 1; `known` ones were measured before."""
    found = [list(interval) for interval in known]
    for number in range(len(found), num_runs):
        began_s = time.monotonic()
        same = _measure(number, seconds=seconds)
        found.append([same.speedup, same.speedup_low, same.speedup_high])
        if number % 10 == 9:
            took_s = time.monotonic() - began_s
            print(f"A/A: run {number + 1} ({took_s:.1f} s each)", file=sys.stderr, flush=True)
    held = [low <= 1 <= high for _speedup, low, high in found]
    return {"runs": len(found), "holding_one": sum(held), "intervals": found}


def _measure(seed: int, *, seconds: float) -> Counterfactual:
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 64, device=device)
    options = ObserverOptions(folder=os.getcwd(), seconds=seconds, proposers=(lambda context: [Same()],))
    observer = Observer(options, on_finished=lambda: None)
    observer.install()
    try:
        while not observer.finished:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        evidence = Assembly(command=("nothing",), folder=options.folder).evidence(
            observer, Ending("measured", 0)
        )
    finally:
        observer.remove()
    same = evidence.counterfactual("same")
    if same is None:
        raise RuntimeError(f"the arm that changes nothing did not run: {evidence.not_measured}")
    return same
