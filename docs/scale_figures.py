"""The tables of scale.md, made from the result files of benchmarks/scale (`tables`).

`faults` and `efficiency` are what was measured.  `counted` is what travelled; `saturation` and `gathered` are
what follows from it for larger jobs, by the formulas below.  `benchmarks/scale/traffic.py` fails where a
count differs from them.

A ring of n processes sends each byte of a sum 2 (n - 1) / n times, in 2 (n - 1) messages.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tables import fill

RESULTS = Path(__file__).parents[1] / "benchmarks" / "scale" / "results"
NOT_MEASURED = "*Not measured yet.*"
REWARD_BYTES, GRADIENT_BYTES, HALF_BYTES = 8, 4, 2
LATENCY_S = 20e-6  # of a message between nodes, assumed
MOST_SHARE = 0.05  # of the time, for the exchange
TRIAL_S = 60.0  # of a search, on one GPU, assumed
MERGED_S = 10.0  # for the evidence of all ranks
LINKS = (10, 100, 400)  # Gb/s
GPUS = (8, 64, 1024)
POPULATION, PROMPTS = 65_536, 8
ADAPTER_WEIGHTS, MODEL_WEIGHTS = 10_000_000, 7_000_000_000
LOST = {
    "end": "waiting for the last bracket",
    "slower": "rows slower beside another worker",
    "start_end": "before the first and after the last trial",
    "waits": "a node waits for an answer",
    "more_work": "trials in vain, or slower beside another",
}

Result = dict[str, Any]


def reward_bytes(population: int, prompts: int, *, ranks: int) -> float:
    """Rewards, and the numbers of tokens and failures, that each rank sends in an epoch of evolution."""
    return round(2 * (population * prompts + 2) * REWARD_BYTES * (ranks - 1) / ranks)


def gradient_bytes(weights: int, *, ranks: int, size: int = GRADIENT_BYTES) -> float:
    """Gradients that each rank sends in a step."""
    return 2 * weights * size * (ranks - 1) / ranks


def exchange_s(num_bytes: float, *, ranks: int, gigabits: float) -> float:
    return 2 * (ranks - 1) * LATENCY_S + num_bytes * 8 / (gigabits * 1e9)


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    tables = {
        "faults": faults,
        "efficiency": efficiency,
        "counted": counted,
        "saturation": saturation,
        "gathered": gathered,
    }
    return fill(markdown, tables, owner="scale", folder=folder)


def latest(folder: Path, subject: str) -> Result | None:
    paths = sorted(folder.glob(f"{subject}_*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    return json.loads(paths[-1].read_text(encoding="utf-8")) if paths else None


def faults(folder: Path) -> str:
    """What was finished before each fault, what of it was lost, and what was done a second time."""
    rows = []
    for name, row in sorted((latest(folder, "faults-search") or {}).items()):
        if isinstance(row, dict):
            verb, _, fault = name.partition(", ")
            unit = "trials" if verb == "tuning" else "rows"
            of = f"{row['rows_before']} {unit}" if "rows_before" in row else "the run failed"
            figures = [row.get(each, "n/a") for each in ("rows_lost", "rows_twice")]
            rows.append([{"tuning": "tune", "search": "steer search"}[verb], fault, of, *map(str, figures)])
    for verb in ("evolve", "adapt"):
        rows += [
            [verb, row["fault"], f"{row['iterations']} iterations", str(row["lost"]), str(row["again"])]
            for row in (latest(folder, f"faults-{verb}") or {"rows": []})["rows"]
        ]
    return _table(["verb", "fault", "of", "lost", "done again"], rows) if rows else NOT_MEASURED


def efficiency(folder: Path) -> str:
    """Two workers against one, and the points that are lost, the largest first."""
    rows = []
    for where, subject in (("", "efficiency-"), (", two processes on one GPU", "efficiency-gpu-")):
        for verb in ("evolve", "adapt", "search"):
            if found := latest(folder, subject + verb):
                lost = [
                    f"{row['phase']} {100 * row['lost']:.1f} ({row['reason']})" for row in found["phases"]
                ]
                name = "steer search" if verb == "search" else verb
                rows.append([name + where, f"{found['efficiency']:.2f}", "; ".join(lost)])
    for name, row in (latest(folder, "efficiency") or {}).items():
        if isinstance(row, dict):
            parts = {part[5:]: 100 * value for part, value in row.items() if part.startswith("lost_")}
            lost = [
                f"{LOST[part]} {value:.1f}"
                for part, value in sorted(parts.items(), key=lambda each: -each[1])
            ]
            verb = "tune, two nodes" if name == "tuning" else "steer " + name
            rows.append([verb, f"{row['efficiency']:.2f}", "; ".join(lost)])
    return _table(["job", "efficiency", "points lost"], rows) if rows else NOT_MEASURED


def counted(folder: Path) -> str:
    traffic, merging, watching = (latest(folder, name) for name in ("traffic", "merging", "watching"))
    rows: list[list[str]] = []
    for row in traffic["evolution"] if traffic else ():
        job = f"{row['population']} members, {row['prompts']} prompts, {row['ranks']} processes"
        rows.append(["evolve", job, f"{_bytes(row['bytes_per_epoch'])} an epoch by each process"])
    for row in traffic["adapters"] if traffic else ():
        job = f"{row['trained_parameters']:,} trained weights, {row['ranks']} processes"
        rows.append(["adapt", job, f"{_bytes(row['bytes_per_step'])} a step by each process"])
    if traffic:
        found = traffic["search"]
        both = found["study_bytes_per_trial"], found["rows_bytes_per_trial"]
        told = f"{_bytes(both[0])} a trial to the study, {_bytes(both[1])} to the folder"
        rows.append(["steer search", f"{found['trials']} trials", told])
    for name, row in (merging or {}).items():
        if name.endswith(" ranks"):
            told = f"{_bytes(row['folder_bytes_per_rank'])} a rank, once; merged in {row['gather_s']:.2g} s"
            rows.append(["diagnose", name, told])
    for arm in ("folder", "pages") if watching else ():
        row = watching[arm]
        told = f"{row['cpu_share_of_a_core']:.1%} of a core; {row['late_median_s']:.2g} s late (median)"
        told += f"; {row['samples_lost_by_restart']} samples lost by a restart"
        rows.append(["watch", f"{watching['nodes']} nodes at 1 Hz, {arm}", told])
    return _table(["verb", "job", "what travels"], rows) if rows else NOT_MEASURED


def saturation(folder: Path) -> str:
    """Seconds of one exchange, and the shortest epoch or step of which it is MOST_SHARE."""
    jobs = {
        f"evolve: {POPULATION:,} members × {PROMPTS} prompts, an epoch": lambda n: reward_bytes(
            POPULATION, PROMPTS, ranks=n
        ),
        f"adapt: {ADAPTER_WEIGHTS / 1e6:.0f} M trained weights, a step": lambda n: gradient_bytes(
            ADAPTER_WEIGHTS, ranks=n
        ),
        f"to compare: all of {MODEL_WEIGHTS / 1e9:.0f} B weights, 16 bits, a step": lambda n: gradient_bytes(
            MODEL_WEIGHTS, ranks=n, size=HALF_BYTES
        ),
    }
    rows = []
    for name, size in jobs.items():
        rows.append([name, "1", "nothing", *("0 s" for _ in LINKS), ""])
        for ranks in GPUS:
            times = [exchange_s(size(ranks), ranks=ranks, gigabits=link) for link in LINKS]
            shortest = " / ".join(_seconds(each / MOST_SHARE) for each in times)
            rows.append(["", f"{ranks:,}", _bytes(size(ranks)), *map(_seconds, times), shortest])
    heads = ["job", "GPUs", "each sends", *(f"{link} Gb/s" for link in LINKS), "saturates below"]
    return _table(heads, rows)


def gathered(folder: Path) -> str:
    """What comes together in one place, and what of that place is full first."""
    traffic, merging, watching = (latest(folder, name) for name in ("traffic", "merging", "watching"))
    if not (traffic and merging and watching):
        return NOT_MEASURED
    a_trial = traffic["search"]["study_bytes_per_trial"] + traffic["search"]["rows_bytes_per_trial"]
    a_rank, merge_s = (merging["512 ranks"][name] for name in ("folder_bytes_per_rank", "gather_s_per_rank"))
    a_node = watching["folder"]["stream_bytes_per_s"] / watching["nodes"]
    most_nodes = watching["nodes"] / watching["folder"]["cpu_share_of_a_core"]
    most_gpus = LINKS[0] * 1e9 / 8 / (a_trial / TRIAL_S)
    jobs = {
        "steer search: a trial a minute on each GPU": (
            lambda n: f"{_bytes(n * a_trial / TRIAL_S)}/s",
            f"a link of {LINKS[0]} Gb/s at {_round(most_gpus)} GPUs; the database long before",
        ),
        "diagnose, once": (
            lambda n: _bytes(n * a_rank),
            f"merging takes {MERGED_S:.0f} s at {_round(MERGED_S / merge_s)} ranks",
        ),
        "watch: nodes of 8 GPUs at 1 Hz, one browser": (
            lambda n: f"{_bytes(-(-n // 8) * a_node)}/s",
            f"one core at {_round(most_nodes)} nodes",
        ),
    }
    rows = [[name, *map(size, (1, *GPUS)), full] for name, (size, full) in jobs.items()]
    heads = ["job", "1 GPU", *(f"{each:,} GPUs" for each in GPUS), "what is full first"]
    return _table(heads, rows)


def _round(number: float) -> str:
    """Two digits and the rest zeros."""
    return f"{round(number, 1 - int(math.log10(number))):,.0f}"


def _bytes(size: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def _seconds(seconds: float) -> str:
    """Two digits, or whole units above them."""
    scale, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "µs"))
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
