"""The table of watch.md, made from the result files of the benchmark (`tables`).

Behind `<!-- watch: cost -->` in the page stands what it costs to watch a job, a row per machine.
What was not measured is said to be so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import fill

RESULTS = Path(__file__).parents[1] / "benchmarks" / "monitor" / "results"
NOT_MEASURED = "*Not measured yet.*"
MONITORS = ("1 Hz", "10 Hz", "nvitop", "codecarbon", "traceml")
SHOWN = {"1 Hz": "Flatout, 1 Hz", "10 Hz": "Flatout, 10 Hz"}
ALONE = {
    "1 Hz": "flatout 1 Hz",
    "10 Hz": "flatout 10 Hz",
    "nvitop": "nvitop 1 Hz",
    "codecarbon": "codecarbon 1 Hz",
}

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    return fill(markdown, {"cost": cost}, owner="watch", folder=folder)


def latest(folder: Path) -> list[Result]:
    """The latest result of every machine; names end in the date."""
    by_machine = {path.stem.rsplit("_", 1)[0]: path for path in sorted(folder.glob("monitor_*.json"))}
    return [json.loads(path.read_text(encoding="utf-8")) for path in by_machine.values()]


def cost(folder: Path) -> str:
    results = latest(folder)
    return "\n\n".join(_table(result) for result in results) if results else NOT_MEASURED


def _table(result: Result) -> str:
    workloads = {name: row for name, row in result["workloads"].items() if "step_s" in row}
    heads = [f"step of `{name}` ({row['step_s'] * 1e3:.1f} ms)" for name, row in workloads.items()]
    lines = [f"{result['hardware']}, torch {result['torch']}{_note(result)}:", ""]
    lines.append(_row(["", *heads, "CPU of its own", "memory", "first sample"]))
    lines.append(_row(["---"] * (len(heads) + 4)))
    for monitor in MONITORS:
        cells = [_ratio(row.get(monitor)) for row in workloads.values()]
        alone = result.get("alone", {}).get(ALONE.get(monitor, ""))
        if any(cells) or alone is not None:
            lines.append(_row([SHOWN.get(monitor, monitor), *cells, *_alone(alone)]))
    return "\n".join(lines)


def _note(result: Result) -> str:
    return f" ({result['note']})" if result.get("note") else ""


def _ratio(found: Result | None) -> str:
    return f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]" if found else ""


def _alone(found: Result | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [
        f"{found['cpu_share_of_a_core']:.2%} of a core",
        f"{found['rss_bytes'] / 1e6:.0f} MB",
        f"{found['first_sample_s']:.2f} s",
    ]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
