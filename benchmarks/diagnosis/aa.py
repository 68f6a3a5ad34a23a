"""The A/A arm: steps as they are under another name, so that whatever is measured of them is chance.

    python benchmarks/diagnosis/aa.py [--runs 100] [--save]

A small job is diagnosed again and again with that one arm, and its 95 % interval has to hold 1 in at least 95
of 100 runs.  `--save` writes results/chance_HARDWARE_DATE.json after each run, and goes on from the runs that
the file of the same day holds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.hardware.host import read_host
from flatout.measure.arms.arm import Same
from flatout.measure.evidence import Counterfactual
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import Observer, ObserverOptions

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS = 30.0  # of one diagnosis at most; it needs a fifth of that


def measure(seed: int) -> Counterfactual:
    """Diagnose a small job with an arm that changes nothing."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 64, device=device)
    options = ObserverOptions(folder=os.getcwd(), seconds=SECONDS, proposers=(lambda context: [Same()],))
    observer = Observer(options)
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


def sums(intervals: Sequence[Sequence[float]]) -> dict[str, Any]:
    """How many of the intervals hold 1."""
    held = [low <= 1 <= high for _speedup, low, high in intervals]
    return {"runs": len(held), "holding_one": sum(held), "intervals": intervals}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, help="runs in all (default: 100)")
    parser.add_argument("--save", action="store_true", help="write results/chance_HARDWARE_DATE.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if on_gpu else read_host().cpu_model or "cpu"
    slug = "".join(c if c.isalnum() else "-" for c in hardware.lower())
    path = RESULTS / f"chance_{slug}_{datetime.date.today().isoformat()}.json"
    stamp = {"hardware": hardware, "torch": str(torch.__version__), "python": platform.python_version()}
    known = json.loads(path.read_text()) if options.save and path.exists() else {}
    intervals = known.get("intervals", []) if stamp.items() <= known.items() else []
    for number in range(len(intervals), options.runs):
        began_s = time.monotonic()
        same = measure(number)
        intervals.append([same.speedup, same.speedup_low, same.speedup_high])
        result = {"benchmark": "chance", **stamp, **sums(intervals)}
        if options.save:
            path.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"run {number + 1}: {same.speedup:.3f} [{same.speedup_low:.3f}, {same.speedup_high:.3f}], "
            f"{result['holding_one']} of {result['runs']} hold 1, {time.monotonic() - began_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    print(json.dumps({"benchmark": "chance", **stamp, **sums(intervals)}))


if __name__ == "__main__":
    main()
