"""The tables of memory.md, made from the result files of the benchmark (`tables`).

Behind `<!-- memory: NAME -->` in the page stands the table of that name, from the latest result.
What was not measured is said to be so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tables import fill

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "memory" / "results"
NOT_MEASURED = "*Not measured yet.*"
OURS, PROBED, REPAIRED = "flatout", "flatout with probe", "flatout, failures repaired"
NATIVE, BY_INDUCTOR = "flatout, natively", "inductor's plan"
QUANTITIES = ("allocated", "reserved")
ANSWERS = {"safe": "safe", "tight": "tight, with flushes", "limit": "limit, nothing kept free"}

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    tables: dict[str, Callable[[Path], str]] = {
        "measured": measured,
        "accuracy": accuracy,
        "probe": probe,
        "families": families,
        "peers": peers,
        "caps": caps,
        "flushes": flushes,
        "expandable": expandable,
        "finder": finder,
        "native": native,
        "compiled": compiled,
    }
    return fill(markdown, tables, owner="memory", folder=folder)


def latest(folder: Path, subject: str) -> Result | None:
    """The latest result of a subject; names end in the date."""
    found = sorted(folder.glob(f"{subject}_*.json"), key=lambda path: path.stem.rsplit("_", 1)[-1])
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def measured(folder: Path) -> str:
    """What the tables below compare with."""
    estimates, table = latest(folder, "estimates"), latest(folder, "measured")
    if estimates is None or table is None:
        return NOT_MEASURED
    rows = table["rows"]
    held_out = {row["family"] for row in rows if row["held_out"]}
    return (
        f"Measured: {len(rows)} configurations of {len({row['family'] for row in rows})} families on one"
        f" {table['hardware']}, torch {table['versions']['torch']}, {table['date']}; estimated on a CPU with"
        f" torch {estimates['estimated_with']['torch']}. Held out: {', '.join(sorted(held_out))}."
    )


def accuracy(folder: Path) -> str:
    """Errors of ours, tuned and held-out families apart, with the first look at the latter."""
    estimates, first = latest(folder, "estimates"), latest(folder, "first-look")
    second, fourth, fifth, sixth = (
        latest(folder, f"unseen-{which}-first-look") for which in ("second", "fourth", "fifth", "sixth")
    )
    unseen = {
        "unseen, first look": (latest(folder, "unseen-first-look"), OURS),
        "unseen, looked at since": (latest(folder, "unseen-estimates"), OURS),
        "**second unseen set, first look**": (second, OURS),
        "the same, failures repaired before measuring": (second, REPAIRED),
        "second unseen set, looked at since": (latest(folder, "unseen-second-estimates"), OURS),
        "**third unseen set, first look**": (latest(folder, "unseen-third-first-look"), OURS),
        "third unseen set, looked at since": (latest(folder, "unseen-third-estimates"), OURS),
        "**fourth unseen set, first look**": (fourth, OURS),
        "fourth unseen set, failures repaired before measuring": (fourth, REPAIRED),
        "fourth unseen set, looked at since": (latest(folder, "unseen-fourth-estimates"), OURS),
        "**fifth unseen set, first look**": (fifth, OURS),
        "fifth unseen set, failures repaired before measuring": (fifth, REPAIRED),
        "fifth unseen set, looked at since": (latest(folder, "unseen-fifth-estimates"), OURS),
        "**sixth unseen set, first look**": (sixth, OURS),
    }
    if estimates is None:
        return NOT_MEASURED
    lines = [
        "| | families | estimated | failed | median | 95th percentile | worst | under | under by over 1 % |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for quantity in QUANTITIES:
        groups = estimates["summary"][OURS][quantity]
        named = {"tuned": groups["tuned"]}
        if first is not None:
            named["held out, first look"] = first["summary"][quantity]
        named |= {"held out": groups["held out"], "all": groups["all"]}
        for name, (found, arm) in unseen.items():
            if found is not None:
                named[name] = found["summary"][arm][quantity]["all"]
        lines += [row([quantity, name, *figures(summary)]) for name, summary in named.items()]
    return "\n".join(lines)


def probe(folder: Path) -> str:
    """All configurations, without and with what short real runs at small batches measured."""
    estimates = latest(folder, "estimates")
    if estimates is None or PROBED not in estimates["summary"]:
        return NOT_MEASURED
    lines = [
        "| | | estimated | failed | median | 95th percentile | worst | under | under by over 1 % |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for quantity in QUANTITIES:
        for name, words in ((OURS, "without a probe"), (PROBED, "with a probe")):
            lines.append(row([quantity, words, *figures(estimates["summary"][name][quantity]["all"])]))
    return "\n".join(lines)


def families(folder: Path) -> str:
    estimates = latest(folder, "estimates")
    if estimates is None:
        return NOT_MEASURED
    held_out = {each["family"] for each in estimates["rows"] if each["held_out"]}
    both = [estimates["summary"][OURS][quantity]["families"] for quantity in QUANTITIES]
    lines = [
        "| family | | configurations | allocated: median | worst | reserved: median | worst |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for family in sorted(both[0], key=lambda name: (name in held_out, name)):
        found = [summaries[family] for summaries in both]
        cells = [percent(summary.get(key)) for summary in found for key in ("median", "worst")]
        kind = "held out" if family in held_out else "tuned"
        lines.append(row([family, kind, str(found[0]["count"] + found[0]["failed"]), *cells]))
    return "\n".join(lines)


def peers(folder: Path) -> str:
    """Allocated bytes, all configurations: what others answer without a GPU."""
    estimates = latest(folder, "estimates")
    if estimates is None:
        return NOT_MEASURED
    lines = [
        "| | estimated | failed | median | 95th percentile | worst | under | under by over 1 % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, quantities in estimates["summary"].items():
        if name == PROBED:  # which needs a GPU
            continue
        lines.append(row([name, *figures(quantities["allocated"]["all"])]))
    return "\n".join(lines)


def caps(folder: Path) -> str:
    """The largest batch under a cap: predicted first and then tried, and held against older searches."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks.memory.accuracy import caps_summary, held_against

    fresh, table, predicted = (latest(folder, name) for name in ("searches", "caps", "predictions"))
    if fresh is None and table is None:
        return NOT_MEASURED
    lines = [
        "| searches | batch | trains | within 3 % or one sample of the largest that trains |",
        "|---|---|--:|--:|",
    ]
    if fresh is not None:
        found = caps_summary(fresh["rows"])
        for name, words in ANSWERS.items():
            if f"{name}_trains_share" in found:
                count = found["count"]
                good = [round(found[f"{name}_{key}_share"] * count) for key in ("trains", "near")]
                counts = [f"{each} of {count}" for each in good]
                lines.append(row(["predicted first and then tried", words, *counts]))
    since = latest(folder, "searches-predictions")
    for searches, batches, said in (
        (fresh, since, "the same, with the rules made since"),
        (table, predicted, "older ones, with the rules made since"),
    ):
        if searches is None or batches is None:
            continue
        again = held_against(searches["rows"], {each["label"]: each for each in batches["rows"]})
        for name, words in ANSWERS.items():
            if f"{name}_trains" in again:
                counts = [f"{again[f'{name}_{key}']} of {again['count']}" for key in ("trains", "near")]
                lines.append(row([said, words, *counts]))
    recommended = latest(folder, "recommended")
    if recommended is not None:
        found = recommended["summary"]
        trains, near = (f"**{found[key]} of {found['count']}**" for key in ("trains", "near"))
        run = num_run(recommended["rows"], [each for each in (fresh, table) if each is not None])
        trains += f" (not above the largest that trains; {run} were run at that batch)"
        lines.append(row(["all of them", "**what `flatout plan` recommends**", trains, near]))
    return "\n".join(lines)


def num_run(recommended: list[Result], searches: list[Result]) -> int:
    """Count the searches that ran the very batch that is recommended, and saw it train."""
    batches = {each["label"]: str(each["recommended"]) for each in recommended}
    rows = [each for table in searches for each in table["rows"] if each["label"] in batches]
    return sum(each["tried"].get(batches[each["label"]], {}).get("trains", False) for each in rows)


def native(folder: Path) -> str:
    """Native estimates beside those of the rules, of the configurations that were traced natively."""
    table = latest(folder, "native")
    if table is None:
        return "*No native estimate has been held against a measurement yet: take it as a second opinion.*"
    lines = [
        "| set | | | estimated | failed | median | 95th percentile | worst | under | under by over 1 % |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, quantities in table["summary"].items():
        for quantity, arms in quantities.items():
            for arm, words in ((NATIVE, "natively"), (OURS, "by rules")):
                lines.append(row([name, quantity, words, *figures(arms[arm])]))
    torch_version = table["estimated_with"]["torch"]
    told = f"Traced on one {table['hardware']} with torch {torch_version}, {table['date']}."
    return "\n".join([told, "", *lines])


def compiled(folder: Path) -> str:
    """Compiled steps: how far the eager estimate is off and, where it has an answer, inductor's plan."""
    table = latest(folder, "compiled-first-look")
    if table is None:
        return NOT_MEASURED
    arms = {"eager estimate": OURS, "inductor's plan": BY_INDUCTOR}
    heads = [f"{words}: {quantity}" for words in arms for quantity in QUANTITIES]
    lines = [row(["configuration", *heads]), "|---|" + "--:|" * len(heads)]
    for each in table["rows"]:
        found = [
            each["errors"].get(arm, {}).get(quantity) for arm in arms.values() for quantity in QUANTITIES
        ]
        cells = ["no answer" if share is None else f"{100 * share:+.1f} %" for share in found]
        lines.append(row([f"`{each['label']}`", *cells]))
    return "\n".join(lines)


def flushes(folder: Path) -> str:
    """What handing memory back costs: samples a second under the same cap."""
    table = latest(folder, "flushes")
    if table is None:
        return NOT_MEASURED
    lines = [
        "| configuration | batch | | samples a second | flushes a step |",
        "|---|--:|---|--:|--:|",
    ]
    for each in table["rows"]:
        speed = f"{each['batch_size'] / each['step_s']:.1f}"
        cells = [each["case"], str(each["batch_size"]), each["arm"], speed, f"{each['flushes_per_step']:.1f}"]
        lines.append(row(cells))
    return "\n".join(lines)


def expandable(folder: Path) -> str:
    """Steps with segments that expand: what was predicted before, beside what was measured."""
    table = latest(folder, "expandable")
    if table is None:
        return NOT_MEASURED
    lines = ["| configuration | allocated: off by | reserved: off by |", "|---|--:|--:|"]
    for each in table["rows"]:
        if "largest" in each or each["predicted"] is None:
            continue
        off = [each["predicted"][name] / each[f"peak_{name}_bytes"] - 1 for name in QUANTITIES]
        lines.append(row([f"`{each['case']}`", *(f"{100 * share:+.2f} %" for share in off)]))
    return "\n".join(lines)


def finder(folder: Path) -> str:
    """Lightning's search on the GPU under the same caps, beside the predicted batches and the largest."""
    names = ("lightning", "caps", "predictions")
    table, searches, predicted = (latest(folder, name) for name in names)
    if table is None or searches is None or predicted is None:
        return NOT_MEASURED
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks.memory.accuracy import largest_trained

    largest = {each["label"]: largest_trained(each) for each in searches["rows"] if each.get("fails_at")}
    ours = {each["label"]: each for each in predicted["rows"]}
    lines = [
        "| configuration | largest that trains | BatchSizeFinder | seconds on the GPU | safe | tight |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for each in table["rows"]:
        label = each["label"]
        if label in largest and label in ours:
            found = [
                largest[label],
                each["found"],
                round(each["seconds"]),
                ours[label]["safe"],
                ours[label]["tight"],
            ]
            lines.append(row([f"`{label}`", *map(str, found)]))
    return "\n".join(lines)


def figures(summary: Mapping[str, Any]) -> list[str]:
    keys = ("median", "p95", "worst", "under_share", "under_1pct_share")
    return [str(summary["count"]), str(summary["failed"]), *(percent(summary.get(key)) for key in keys)]


def percent(share: float | None) -> str:
    """Two digits after the point where an error is small enough to need them."""
    if share is None:
        return "n/a"
    return f"{100 * share:.2f} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
