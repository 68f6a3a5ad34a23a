"""The tables of ceilings.md and scoreboard.md, made from the result files of the benchmark (`tables`).

Behind `<!-- diagnosis: NAME -->` in the page stands the table of that name, made from the latest
result of each kind of hardware.  What was not measured is said to be so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import fill

from flatout.ground.units import UNKNOWN, show_ratio

RESULTS = Path(__file__).parents[1] / "benchmarks" / "diagnosis" / "results"

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    tables: dict[str, Callable[[Path], str]] = {
        "table": ceilings,
        "goals": goals,
        "chance": chance,
        "scripts": scripts,
        "scoreboard": scoreboard,
        "rules": rules,
        "faults": faults,
        "peers": peers,
    }
    return fill(markdown, tables, owner="diagnosis", folder=folder)


def latest(folder: Path, subject: str = "diagnosis-") -> list[Result]:
    """The latest result of each hardware; names end in the date, so order is age."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{subject}*.json")):
        found[path.stem.rsplit("_", 1)[0]] = path
    return [_read(path) for path in found.values()]


def _read(path: Path) -> Result:
    """A result with the date of its name: rules may have changed since."""
    return {**json.loads(path.read_text()), "date": path.stem.rsplit("_", 1)[1]}


def ceilings(folder: Path) -> str:
    """A table per hardware."""
    parts = []
    for result in latest(folder):
        shares = _from_shares(folder, result["device"])
        rows = [
            "| planted fault | real gain | ceiling | arm | from shares |",
            "|---|--:|--:|---|--:|",
            *(_row(row, shares) for row in result["rows"]),
        ]
        parts.append("\n".join([f"On {result['hardware']}, {result['date']}:", "", *rows]))
    return "\n\n".join(parts) or "*Not measured yet.*"


def _row(row: Result, shares: dict[str, float | None]) -> str:
    real = f"{show_ratio(row['real'])} [{row['real_low']:.2f}, {row['real_high']:.2f}]"
    before = show_ratio(shares.get(row["name"])) if shares.get(row["name"]) else UNKNOWN
    if row["ceiling"] is None:
        why = row.get("reason") or ("no ceiling" if row["found"] else "nothing found")
        return f"| {row['name']} | {real} | {UNKNOWN} | {why} | {before} |"
    interval = f" [{row['low']:.2f}, {row['high']:.2f}]" if row["low"] and row["high"] else ""
    of_job = ", of the job" if row["of"] == "job" else ""
    ceiling = f"{show_ratio(row['ceiling'])}{interval}{of_job}"
    return f"| {row['name']} | {real} | {ceiling} | {row['arm']} | {before} |"


def _from_shares(folder: Path, device: str) -> dict[str, float | None]:
    path = folder / f"shares_{device}.json"
    return json.loads(path.read_text())["ceilings"] if path.exists() else {}


def goals(folder: Path) -> str:
    """Which rows miss a goal, by name."""
    lines = []
    for result in latest(folder):
        kept, score = result["goals"], result["score"]
        misses = {
            "real gain above 1.1 times the ceiling": kept["real_above_ceiling"],
            "real gain below the ceiling divided by 2.5": kept["real_far_below_ceiling"],
            "treatment off by more than 15 %": kept["treatments_off"],
        }
        said = "; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in misses.items())
        judged = ", ".join(f"{name} {words}" for name, words in score.items())
        lines.append(
            f"- {result['hardware']}, {kept['with_ceiling']} ceilings in {kept['rows']} rows: {said}. "
            f"All planted and clean scripts: {judged}."
        )
    return "\n".join(lines) or "*Not measured yet.*"


def chance(folder: Path) -> str:
    lines = [
        f"- {result['hardware']}, {result['date']}: "
        f"{result['holding_one']} of {result['runs']} intervals hold 1."
        for result in latest(folder, "chance_")
    ]
    return "\n".join(lines) or "*Not measured yet.*"


def scripts(folder: Path) -> str:
    """Ordinary scripts: findings, and what mending their causes by hand gained; a table per hardware."""
    parts = []
    for result in latest(folder, "scripts_"):
        rows = ["| script | finding | ceiling | fixed by hand | real gain |", "|---|---|--:|---|--:|"]
        for script in result["scripts"]:
            rows += _script_rows(script)
        num_harmed = sum(script["harm"] is not None for script in result["scripts"])
        num_run = sum("rows" in script for script in result["scripts"])
        said = (
            f"On {result['hardware']}, {result['date']}, {num_run} scripts, "
            f"{num_harmed or 'none'} of them harmed:"
        )
        parts.append("\n".join([said, "", *rows]))
    return "\n\n".join(parts) or "*Not measured yet.*"


def _script_rows(script: Result) -> list[str]:
    name = script["script"].removesuffix(".py")
    if "rows" not in script:
        return [f"| {name} | {script.get('skipped') or script['harm']} | | | |"]
    rows = []
    for row in script["rows"]:
        finding = f"{row['finding']}, `{row['place']}`" if row["finding"] else "none"
        ceiling = _measured(row, "ceiling", "low", "high")
        if row["finding"] and row["ceiling"] is None and row["share"] is not None:
            ceiling = f"share {row['share']:.0%}"
        real = _measured(row, "real", "real_low", "real_high")
        rows.append(f"| {name} | {finding} | {ceiling} | {row['cause'] or UNKNOWN} | {real} |")
    return rows


def _measured(row: Result, value: str, low: str, high: str) -> str:
    if row[value] is None:
        return UNKNOWN
    interval = f" [{row[low]:.2f}, {row[high]:.2f}]" if row.get(low) and row.get(high) else ""
    return f"{show_ratio(row[value])}{interval}"


def _latest_board(folder: Path) -> Result | None:
    """The latest of all hardware: each holds every device that was recorded."""
    found = sorted(folder.glob("scoreboard-*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    return _read(found[-1]) if found else None


def scoreboard(folder: Path) -> str:
    """The sums over all scripts."""
    board = _latest_board(folder)
    if board is None:
        return "*Not measured yet.*"
    rows = ["| | |", "|---|--:|", *(f"| {name} | {_sum(words)} |" for name, words in board["total"].items())]
    said = (
        f"{board['scripts']} scripts, live on {board['hardware']} and replayed as they were recorded, "
        f"{board['date']}: {board['cases']} cases."
    )
    rows += [
        f"| {what}, {device} | {kept['with_ceiling'] - len(kept[misses])} of {kept['with_ceiling']} |"
        for device, kept in board["goals"].items()
        for what, misses in (
            ("real gain at most 1.1 × ceiling", "real_above_ceiling"),
            ("real gain at least ceiling / 2.5", "real_far_below_ceiling"),
        )
    ]
    missing = [f"Not run: {', '.join(board['not_run'])}."] if board["not_run"] else []
    return "\n\n".join([said, "\n".join(rows), *missing])


def _sum(words: str) -> str:
    return " ".join(words.split())


def rules(folder: Path) -> str:
    board = _latest_board(folder)
    if board is None:
        return "*Not measured yet.*"
    lines = [
        "| rule | right | found | exact | first | clean | of clean | ceiling, and real gain |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in board["rules"]:
        cells = [" of ".join(map(str, row[key])) for key in ("right", "found", "exact", "first", "clean")]
        gains = "; ".join(
            f"{gain['device']}: {show_ratio(gain['ceiling']) if gain['ceiling'] else UNKNOWN}, "
            f"{show_ratio(gain['real'])}"
            for gain in row["gains"]
        )
        lines.append(f"| {row['code']} {row['name']} | {' | '.join(cells)} | {row['of_clean']} | {gains} |")
    return "\n".join(lines)


def faults(folder: Path) -> str:
    """Every fault of every case, by name."""
    board = _latest_board(folder)
    if board is None:
        return "*Not measured yet.*"
    lines = [f"- {case}: {'; '.join(said)}" for case, said in board["faults"].items()]
    lines += [f"- {case}: said first: {first}" for case, first in board["not_first"].items()]
    return "\n".join(lines) or "Nothing."


def peers(folder: Path) -> str:
    """A table per device, over the scripts that all tools met there."""
    board = _latest_board(folder)
    parts = []
    for there in board["peers"] if board is not None else []:
        sums = [name for name in there["tools"][0] if name not in ("tool", "scripts")]
        rows = [f"| tool | scripts | {' | '.join(sums)} |", f"|---|{'--:|' * (len(sums) + 1)}"]
        notes = []
        for tool in there["tools"]:
            if tool.get("cannot"):
                notes.append(f"{tool['tool']} did not run: {tool['cannot']}.")
                continue
            cells = [_sum(tool[name]) for name in sums]
            rows.append(f"| {tool['tool']} | {tool['scripts']} | {' | '.join(cells)} |")
            if tool.get("without_answer"):
                reasons = "; ".join(f"{case}: {why}" for case, why in tool["without_answer"].items())
                notes.append(f"{tool['tool']} gave no answer on {len(tool['without_answer'])}: {reasons}.")
        parts.append("\n\n".join([f"On {there['device']}:", "\n".join(rows), *notes]))
    return "\n\n".join(parts) or "*Not measured yet.*"
