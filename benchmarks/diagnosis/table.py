"""Ceilings beside real gains, whether the goals are met, and the scoreboard, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Arms that do what the fix does; the others make a cause vanish and so are bounds.
TREATMENTS = (
    *("autocast", "tf32", "reads-free", "staged", "trimmed", "workers"),
    *("batched-call", "library-recurrence", "persistent"),
)
MOST_ABOVE, MOST_BELOW, SHARE_BELOW, TREATMENT_WITHIN = 1.1, 2.5, 0.9, 0.15


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["real"])


def goals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows keep each promise, with the names of those that do not.

    A row whose two intervals leave room for the promise is marked with a question mark.
    """
    known = [row for row in rows if row["ceiling"] is not None]
    treated = [row for row in known if row["arm"] in TREATMENTS]
    above = [_named(row, "real_low", "high", MOST_ABOVE) for row in known if _ratio(row) > MOST_ABOVE]
    below = [_named(row, "low", "real_high", MOST_BELOW) for row in known if 1 / _ratio(row) > MOST_BELOW]
    off = [
        _named(row, *ends, 1 + TREATMENT_WITHIN)
        for row in treated
        for ends in [("real_low", "high") if _ratio(row) > 1 else ("low", "real_high")]
        if abs(1 / _ratio(row) - 1) > TREATMENT_WITHIN
    ]
    return {
        "rows": len(rows),
        "with_ceiling": len(known),
        "real_above_ceiling": above,
        "real_far_below_ceiling": below,
        "treatments": len(treated),
        "treatments_off": off,
        "without_ceiling": [row["name"] for row in rows if row["ceiling"] is None],
    }


def _ratio(row: dict[str, Any]) -> float:
    return float(row["real"] / row["ceiling"])


def _named(row: dict[str, Any], larger: str, smaller: str, most: float) -> str:
    """The row's name, marked where the ends of its intervals that are nearest keep the promise."""
    if row.get(larger) is None or row.get(smaller) is None:
        return str(row["name"])
    return str(row["name"]) + ("" if row[larger] > most * row[smaller] else "?")


def print_table(result: dict[str, Any]) -> None:
    print(f"{'planted fault':32}{'real gain':>22}{'ceiling':>22}  {'arm':20}{'ceiling/real':>12}")
    for row in result["rows"]:
        real = f"{row['real']:.2f} [{row['real_low']:.2f}, {row['real_high']:.2f}]"
        if row["ceiling"] is None:
            why = row.get("reason") or ("no ceiling" if row["found"] else "nothing found")
            print(f"{row['name']:32}{real:>22}{'n/a':>22}  {why}")
            continue
        ceiling = f"{row['ceiling']:.2f}"
        if row["low"] is not None and row["high"] is not None:
            ceiling += f" [{row['low']:.2f}, {row['high']:.2f}]"
        scope = f"{row['arm']} ({row['of']})"
        print(f"{row['name']:32}{real:>22}{ceiling:>22}  {scope:20}{row['ceiling'] / row['real']:>12.2f}")
    kept = result["goals"]
    print()
    print(f"real gain above 1.1 x ceiling: {', '.join(kept['real_above_ceiling']) or 'none'}")
    print(f"real gain below ceiling / 2.5: {', '.join(kept['real_far_below_ceiling']) or 'none'}")
    print(f"treatments off by over 15 %:   {', '.join(kept['treatments_off']) or 'none'}")
    for name, value in result["score"].items():
        print(f"{name:31}{value}")


def print_board(result: dict[str, Any]) -> None:
    counts = ("right", "found", "exact", "first", "clean")
    print(f"{'rule':30}" + "".join(f"{name:>8}" for name in counts) + "  ceiling / real gain")
    for row in result["rules"]:
        gains = "; ".join(
            f"{gain['device']} {gain['ceiling'] or float('nan'):.2f} / {gain['real']:.2f}"
            for gain in row["gains"]
        )
        cells = [f"{part}/{whole}" for part, whole in (row[key] for key in counts)]
        print(f"{row['name']:30}" + "".join(f"{cell:>8}" for cell in cells) + f"  {gains}")
    print(f"\n{result['scripts']} scripts, {result['cases']} cases")
    for name, words in result["total"].items():
        print(f"{name:13}{words}")
    for device, kept in result["goals"].items():
        print(f"{device}: {kept['with_ceiling']} ceilings in {kept['rows']} pairs")
        print(f"  real gain above 1.1 x ceiling: {', '.join(kept['real_above_ceiling']) or 'none'}")
        print(f"  real gain below ceiling / 2.5: {', '.join(kept['real_far_below_ceiling']) or 'none'}")
    for case, faults in result["faults"].items():
        print(f"{case}: {'; '.join(faults)}")
    for case, first in result["not_first"].items():
        print(f"{case}: said first: {first}")
    for peers_there in result["peers"]:
        print(f"\non {peers_there['device']}:")
        for tool in peers_there["tools"]:
            sums = ", ".join(f"{name} {tool[name].strip().split('  ')[0]}" for name in result["total"])
            print(f"{tool['tool']}, {tool['scripts']} scripts: {tool.get('cannot') or sums}")
    if result["not_run"]:
        print(f"\nnot run: {', '.join(result['not_run'])}")
