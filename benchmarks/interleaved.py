"""Arms timed in turn in one process, and their ratios with an interval.

What changes slowly on a shared machine hits all arms of a round alike and cancels in the round's ratio.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flatout

ROUND_S = 0.02  # an arm runs at least this long in a round


def measure(arms: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every arm in every round; the order of the arms rotates."""
    repeats = {}
    for name, arm in arms.items():
        arm()
        start = time.perf_counter()
        arm()
        repeats[name] = max(1, int(ROUND_S / max(time.perf_counter() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            arm = arms[name]
            arm()  # the caches are this arm's
            start = time.perf_counter()
            for _ in range(repeats[name]):
                arm()
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return seconds


def compare(seconds: Mapping[str, list[float]], *, ours: str) -> dict[str, dict[str, float]]:
    """For every arm its median seconds, and how many times as long as `ours` it takes."""
    return {
        name: {"seconds": float(np.median(values)), **ratio(values, seconds[ours])}
        for name, values in seconds.items()
    }


def ratio(slower: list[float], faster: list[float]) -> dict[str, float]:
    """The median over rounds, with its 95 % bootstrap interval."""
    values, random = np.array(slower) / np.array(faster), np.random.default_rng(0)
    medians = np.median(random.choice(values, size=(4000, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"ratio": float(np.median(values)), "low": float(low), "high": float(high), "rounds": len(values)}


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write results/SUBJECT_HARDWARE_DATE.json")
    return parser


class ResultFile:
    """SUBJECT_HARDWARE_DATE.json of one run, which leaves that of another run of the day as it is."""

    def __init__(self, folder: Path | None, *, subject: str, result: Mapping[str, Any]) -> None:
        self.result, self.path = result, None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            hardware = "".join(c if c.isalnum() else "-" for c in str(result["hardware"]).lower())
            stem = f"{subject}_{hardware}_{result['date']}"
            names = (f"{stem}{'' if run == 1 else f'-{run}'}.json" for run in itertools.count(1))
            self.path = next(folder / name for name in names if not (folder / name).exists())

    def write(self) -> None:
        """Keep what is known so far: a run that is cut short leaves what it has."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def report(subject: str, rows: Mapping[str, Any], *, folder: Path, save: bool) -> None:
    """The JSON line, and the result file if it is to be kept."""
    result = {
        "benchmark": subject,
        "hardware": f"{torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()}",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "flatout": flatout.__version__,
        **rows,
    }
    print(json.dumps(result))
    if save:
        hardware = "".join(c if c.isalnum() else "-" for c in str(result["hardware"]).lower())
        path = folder / "results" / f"{subject}_{hardware}_{datetime.date.today().isoformat()}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def cpu_name() -> str:
    from flatout.hardware.host import read_host

    host = read_host()
    return f"{host.cpu_model or 'CPU'}, {host.cores:g} cores" if host.cores else str(host.cpu_model)
