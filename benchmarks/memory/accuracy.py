"""How far estimates are from measurements, in shares of the measured value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

QUANTITIES = ("allocated", "reserved")
PREDICTED = ("safe", "tight", "limit")


def error_share(estimated: float | None, measured: float) -> float | None:
    """Positive: estimated too high."""
    return None if estimated is None else (estimated - measured) / measured


def summarize(errors: Iterable[float | None]) -> dict[str, Any]:
    """Of the sizes of the errors median, 95th percentile and worst; how often and how far under."""
    values = list(errors)
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {"count": 0, "failed": len(values)}
    sizes = np.abs(known)
    return {
        "count": len(known),
        "failed": len(values) - len(known),
        "median": float(np.median(sizes)),
        "p95": float(np.percentile(sizes, 95, method="higher")),
        "worst": float(sizes.max()),
        "under_share": float((known < 0).mean()),
        "under_1pct_share": float((known < -0.01).mean()),
        "lowest": float(known.min()),
    }


def by_group(rows: Sequence[Mapping[str, Any]], *, estimator: str, quantity: str) -> dict[str, Any]:
    """Tuned and held-out families apart, all of them, and each family; of rows it was asked about."""
    groups: dict[str, list[float | None]] = {"tuned": [], "held out": [], "all": []}
    families: dict[str, list[float | None]] = {}
    for row in (row for row in rows if estimator in row["errors"]):
        error = row["errors"][estimator].get(quantity)
        groups["held out" if row["held_out"] else "tuned"].append(error)
        groups["all"].append(error)
        families.setdefault(row["family"], []).append(error)
    return {
        **{name: summarize(errors) for name, errors in groups.items()},
        "families": {name: summarize(errors) for name, errors in families.items()},
    }


def show_share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:+.2f} %"


def summary_line(name: str, summary: Mapping[str, Any]) -> str:
    if not summary["count"]:
        return f"{name:<34} no estimate ({summary['failed']} failed)"
    figures = "  ".join(f"{key} {100 * summary[key]:6.2f} %" for key in ("median", "p95", "worst"))
    return (
        f"{name:<34} n={summary['count']:<3} {figures}  under {100 * summary['under_share']:3.0f} %"
        f" (by over 1 %: {100 * summary['under_1pct_share']:3.0f} %, lowest {show_share(summary['lowest'])})"
        + (f"  failed {summary['failed']}" if summary["failed"] else "")
    )


def caps_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of searches under a cap: does the recommended batch train, and how near is it to the largest?

    Near is within one sample or 3 % of the largest batch that trained.
    """
    closed = [row for row in rows if row.get("safe") is not None and row.get("fails_at") is not None]
    result: dict[str, Any] = {"count": len(closed), "undecided": len(rows) - len(closed)}
    for name in PREDICTED:
        asked = [row for row in closed if row.get(name) is not None and row.get(f"{name}_trains") is not None]
        if asked:
            result[f"{name}_trains_share"] = sum(row[f"{name}_trains"] for row in asked) / len(asked)
            near = sum(is_near(row[name], largest_trained(row)) for row in asked)
            result[f"{name}_near_share"] = near / len(asked)
    return result


def held_against(
    rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Batches predicted after the searches, held against what these found: nothing is tried again.

    A batch up to the largest that trained counts as one that trains; a batch above it that was not tried
    itself, and is below the smallest that failed, is undecided and counts as neither.
    """
    closed = [row for row in rows if row.get("fails_at") is not None and row["label"] in predicted]
    result: dict[str, Any] = {"count": len(closed), "not_asked": len(rows) - len(closed)}
    for name in PREDICTED:
        batches = [(predicted[row["label"]][name], row) for row in closed if name in predicted[row["label"]]]
        if not batches:
            continue
        result[f"{name}_trains"] = sum(batch <= largest_trained(row) for batch, row in batches)
        result[f"{name}_fails"] = [row["label"] for batch, row in batches if batch >= row["fails_at"]]
        result[f"{name}_near"] = sum(is_near(batch, largest_trained(row)) for batch, row in batches)
    return result


def largest_trained(row: Mapping[str, Any]) -> int:
    """Of everything a search tried."""
    tried = row.get("tried", {})
    return max([int(row["largest"]), *(int(size) for size, found in tried.items() if found["trains"])])


def is_near(batch: int, largest: int) -> bool:
    return abs(largest - batch) <= max(1.0, 0.03 * largest)


def finder_summary(rows: Sequence[Mapping[str, Any]], largest: Mapping[str, int]) -> dict[str, Any]:
    """Of another search for the largest batch: how near it came, and how long it took."""
    found = [row for row in rows if row.get("found") and row["label"] in largest]
    if not found:
        return {"count": 0, "failed": len(rows)}
    return {
        "count": len(found),
        "failed": sum("error" in row for row in rows),
        "near_share": sum(is_near(row["found"], largest[row["label"]]) for row in found) / len(found),
        "over_share": sum(row["found"] > largest[row["label"]] for row in found) / len(found),
        "median_of_largest": float(np.median([row["found"] / largest[row["label"]] for row in found])),
        "median_seconds": float(np.median([row["seconds"] for row in found])),
    }
