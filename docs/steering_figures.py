"""The tables of steering.md, made from the result files of the benchmark (`tables`).

Behind `<!-- steering: NAME -->` in the page stands the table of that name, from the latest result of
each model and hardware.  What was not measured is said to be so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tables import fill, in_order

RESULTS = Path(__file__).parents[1] / "benchmarks" / "steering" / "results"
# The folder that `flatout fetch smollm2` writes.
NAMES = {"smollm2": "SmolLM2-135M-Instruct"}
NOT_MEASURED = "*Not measured yet.*"
ALONE, SINGLE = "times one trial at a time", "times one question at a time"
BARE = "a bare forward of"
# section, beginning of the arm's name, ratio or number of its row, what the table says, goal
LINES = (
    ("extraction", "extract", "of the bare forward", f"extraction, of {BARE} the same batches", "0.95"),
    (
        "extraction",
        "extract, tokenised ahead",
        "of the bare forward",
        f"the same, texts tokenised ahead, of {BARE} its batches",
        "0.95",
    ),
    ("extraction", "extract", "of it and tokenising", "the same, tokenising in both", ""),
    ("extraction", "extract", "times a pass per layer", "times a pass per layer and text", ""),
    ("extraction", "extract, pairs", "of both texts apart", f"pairs, of {BARE} both texts", ""),
    ("store", "read", "times as fast as computing", "read from the store, times computing", ""),
    ("steered", "steered, one configuration", "of unsteered", "steered tokens/s, of unsteered", "0.97"),
    ("steered", "steered, ", "of unsteered", "every row its own configuration, of unsteered", "0.97"),
    ("trials", "packed", "trials per hour", "trials per hour, judged by texts", ""),
    ("trials", "packed", f"{ALONE}, transformers' generate", f"{ALONE}, `generate`", "20"),
    (
        "trials",
        "packed, texts of",
        f"{ALONE}, transformers' generate",
        "the same, texts that end at random",
        "20",
    ),
    ("trials", "packed", f"{SINGLE}, transformers' generate", f"{SINGLE}, `generate`", ""),
    ("trials", "packed", f"{ALONE}, this engine", f"{ALONE}, this engine", ""),
    ("trials", "packed, texts of", "packing efficiency", "slots used, texts of differing length", "0.8"),
    (
        "search",
        "search, every question",
        "trials per hour",
        "trials per hour of a search with a judge, every question",
        "",
    ),
    (
        "search",
        "search, every question",
        f"{ALONE}, transformers' generate and Optuna",
        f"{ALONE}, `generate` and Optuna",
        "100",
    ),
    (
        "search",
        "search, halved",
        f"{ALONE}, transformers' generate and Optuna",
        "the same, halved",
        "100",
    ),
    (
        "search",
        "search, halved in two brackets",
        f"{ALONE}, transformers' generate and Optuna",
        "the same, halved in two brackets",
        "100",
    ),
    ("choices", "packed", "trials per hour", "trials per hour, judged by two answers", ""),
    ("choices", "packed", f"{ALONE}, the model's own forward", f"{ALONE}, the model's forward", ""),
    ("choices", "packed", f"{ALONE}, this engine", f"{ALONE}, this engine", ""),
)

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    tables: dict[str, Callable[[Path], str]] = {"speed": speed, "peers": peers}
    return fill(markdown, tables, owner="steering", folder=folder)


def latest(folder: Path, pattern: str) -> list[Result]:
    """The latest result of each subject and hardware; names end in the date, so order is age."""
    found: dict[str, Path] = {}
    for path in in_order(folder, pattern):
        found[path.stem.rsplit("_", 1)[0]] = path
    return [json.loads(path.read_text(encoding="utf-8")) for path in found.values()]


def speed(folder: Path) -> str:
    """One column for each model and hardware, of the latest run of each section."""
    found: dict[str, dict[str, list[Result]]] = {}
    results = [json.loads(path.read_text(encoding="utf-8")) for path in in_order(folder, "steering-*.json")]
    for result in sorted(results, key=lambda one: str(one["date"])):
        for model, sections in by_model(result):
            found.setdefault(f"{model}, {result['hardware']}", {}).update(sections)
    columns = list(found.items())
    if not columns:
        return NOT_MEASURED
    lines = [
        "| | goal | " + " | ".join(title for title, _ in columns) + " |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    for section, arm, name, words, goal in LINES:
        cells = [shown(value_of(sections.get(section, []), arm, name)) for _, sections in columns]
        if any(cells):
            lines.append(f"| {words} | {goal} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_model(result: Result) -> Iterator[tuple[str, dict[str, list[Result]]]]:
    """Each model of a result and the rows of its sections."""
    for model in dict.fromkeys(section["model"] for section in result["sections"]):
        yield (
            NAMES.get(model, model),
            {one["section"]: one["rows"] for one in result["sections"] if one["model"] == model},
        )


def value_of(rows: list[Result], arm: str, name: str) -> Any:
    """A number of the arm of that name, or else of the last whose name begins so."""
    exact = [row for row in rows if row["arm"] == arm]
    found = exact or [row for row in rows if row["arm"].startswith(arm)][-1:]
    return found[0].get(name) if found else None


def shown(value: Any) -> str:
    """A ratio with its interval, or a number."""
    if value is None:
        return ""
    if isinstance(value, dict):
        digits = 3 if value["ratio"] < 2 else 1
        return f"{value['ratio']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def peers(folder: Path) -> str:
    """What the other packages take, in our time."""
    results = latest(folder, "peers-*.json")
    if not results:
        return NOT_MEASURED
    result = results[-1]
    model, hardware, threads = result["model"], result["hardware"], result["threads"]
    lines = [
        f"{model} in float32, {hardware}, {threads} used, torch {result['torch']}, {result['date']}:",
        "",
        "| package | CPU time, times ours | wall time, times ours | values apart |",
        "|---|--:|--:|--:|",
    ]
    for row in result["rows"]:
        if "skipped" in row:
            lines.append(f"| {row['peer']} | *not run: {row['skipped']}* | | |")
            continue
        apart = "" if row["apart"] is None else f"{row['apart']:.0e}"
        cells = [shown(row["times_our_cpu_s"]), shown(row["times_our_wall_s"]), apart]
        lines.append(f"| {row['peer']} {row['version']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
