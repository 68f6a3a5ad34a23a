"""The tables of tune.md, made from the result files of the benchmark (`tables`).

`<!-- tuning: proofs -->` marks what the tuner must never do, a row per part and every failure below it;
`<!-- tuning: planted -->` what it gains on planted faults beside mending them by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import fill

RESULTS = Path(__file__).parents[1] / "benchmarks" / "tuning" / "results"
NOT_MEASURED = "*Not measured yet.*"
ENOUGH = 0.9
LENGTH = len("2026-01-01")  # of the date at the end of a file's name

Result = dict[str, Any]
PARTS = {
    "wrong": ("planted mistakes, as each class", "all rejected"),
    "traps": ("traps", "all refused"),
    "noise": ("comparisons of a job with itself", "at most 2 % kept"),
    "decoys": ("scripts that only look faulty, with what would fix them", "nothing kept"),
}


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    return fill(markdown, {"proofs": proofs, "planted": planted}, owner="tuning", folder=folder)


def proofs(folder: Path) -> str:
    return _each(folder, _proofs)


def planted(folder: Path) -> str:
    return _each(folder, _planted)


def _each(folder: Path, table: Callable[[Result], list[str]]) -> str:
    """One table per machine; each part, and each planted fault, is from its latest run.

    Names of results end in the date.
    """
    by_machine: dict[str, Result] = {}
    for path in sorted(folder.glob("tuning_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        known = by_machine.get(path.stem.rsplit("_", 1)[0], {"rows": {}, "items": {}})
        for part, items in result["items"].items():
            result["items"][part] = {
                name: {"date": path.stem[-LENGTH:], **item} for name, item in items.items()
            }
        if "planted" in result["items"]:  # a run of some of them leaves the others as they are
            before = known["items"].get("planted", {})
            result["items"]["planted"] = {**before, **result["items"]["planted"]}
        parts = {key: {**known[key], **result[key]} for key in ("rows", "items")}
        by_machine[path.stem.rsplit("_", 1)[0]] = {**result, **parts}
    found = [
        "\n".join([f"{result['hardware']}, torch {result['torch']}:", "", *lines])
        for result in by_machine.values()
        if (lines := table(result))
    ]
    return "\n\n".join(found) or NOT_MEASURED


def _measured(items: Result) -> str:
    """Return the days on which items were measured, and how busy the machine was if they say it."""
    dates = sorted({item["date"] for item in items.values()})
    loads = [item["load_1min"] for item in items.values() if "load_1min" in item]
    busy = f", load {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    return " to ".join(dates[:1] + dates[1:][-1:]) + busy


def _proofs(result: Result) -> list[str]:
    rows = [
        _row([what, *_counts(part, result["rows"][part]), goal, _measured(result["items"][part])])
        for part, (what, goal) in PARTS.items()
        if part in result["rows"]
    ]
    if not rows:
        return []
    failed = [
        f"- not right: {name}, {item.get('answer') or ', '.join(item.get('kept', ()))}"
        for part in PARTS
        for name, item in result["items"].get(part, {}).items()
        if not item.get("right", True)
    ]
    return [
        _row(["what", "number", "found", "a peer's rule on the same runs", "goal", "measured"]),
        _row(["---"] * 6),
        *rows,
        *(["", *failed] if failed else []),
    ]


def _counts(part: str, row: Result) -> list[str]:
    if part == "wrong":
        peer = f"{row['planted'] - row['passed_by_a_peers_loss_rule']} rejected"
        return [str(row["planted"]), f"{row['rejected']} rejected", peer]
    if part == "noise":
        kept = sum(row[kind]["kept"] for kind in ("in_one_run", "pairs_of_runs"))
        peer = row["peer"]
        return [
            str(row["comparisons"]),
            f"{kept} kept ({row['false_keeps']:.1%})",
            f"{peer['kept_if_3_percent_faster']} of {peer['comparisons']} kept",
        ]
    return [str(row["items"]), f"{row['right']} right", ""]


def _planted(result: Result) -> list[str]:
    rows = [
        _row(
            [
                f"`{name}`",
                _with_interval(item["tuned"], item["low"], item["high"]),
                _with_interval(item["by_hand"], item["by_hand_low"], item["by_hand_high"]),
                f"{item['share']:.2f}" + ("" if item["share"] >= ENOUGH else " (missed)"),
                ", ".join(item["kept"]) or "nothing kept",
                item["date"],
            ]
        )
        for name, item in sorted(result["items"].get("planted", {}).items())
    ]
    if not rows:
        return []
    return [_row(["fault", "tuned", "fixed by hand", "share", "kept", "measured"]), _row(["---"] * 6), *rows]


def _with_interval(ratio: float, low: float | None, high: float | None) -> str:
    return f"{ratio:.2f}×" if low is None else f"{ratio:.2f}× [{low:.2f}, {high:.2f}]"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
