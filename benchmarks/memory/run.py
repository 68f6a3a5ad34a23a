"""How far predictions made without a GPU are from what a GPU measured.

    python benchmarks/memory/run.py [--measured FILE] [--only SUBSTRING] [--peers] [--tuned] [--save]
    python benchmarks/memory/run.py --update --save        # ours again, the other arms as they were saved
    python benchmarks/memory/run.py --set unseen --save    # families that nothing was tuned on at first
    python benchmarks/memory/run.py --predictions FILE     # largest batches under the caps, for measure.py

Every configuration of the measured table is estimated on this machine's CPU, each in a process of its own.
Prints a line per configuration, a summary with tuned and held-out families apart, then one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory import estimates  # noqa: E402
from benchmarks.memory.accuracy import (  # noqa: E402
    QUANTITIES,
    by_group,
    caps_summary,
    error_share,
    finder_summary,
    held_against,
    show_share,
    summary_line,
)
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import SETS, every_configuration  # noqa: E402
from benchmarks.memory.peers import PEERS  # noqa: E402
from benchmarks.memory.preparation import import_everything  # noqa: E402
from benchmarks.memory.table import (  # noqa: E402
    RESULTS,
    latest_table,
    measured_rows,
    read_table,
    unmatched,
    write_table,
)

OURS = "flatout"
PROBED = "flatout with probe"
GIB = 2**30


def gather(
    rows: list[tuple[Configuration, dict[str, Any]]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One comparison per configuration, printed as it is complete."""
    estimators: dict[str, Any] = {OURS: estimates.estimate}
    if arguments.probe:  # which answers for both
        estimators = {PROBED: estimates.estimate_with_probe}
    if arguments.peers:
        estimators |= PEERS
    measured = {configuration.label: row for configuration, row in rows}
    tasks: list[Task] = []
    for configuration, row in rows:
        for name, work in estimators.items():
            extra = (row,) if name == PROBED else ()
            tasks.append((f"{name}|{configuration.label}", _timed, (work, configuration, *extra)))
    answers: dict[str, dict[str, Any]] = {label: {} for label in measured}
    compared = []
    with Pool(width=arguments.width, limit_s=arguments.child_seconds) as pool:
        for key, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            name, label = key.split("|", 1)
            answers[label][name] = answer
            if len(answers[label]) == len(estimators):
                compared.append(compare(measured[label], with_plain_answer(answers[label])))
                print(show(compared[-1]), flush=True)
    return compared


def _timed(work: Any, *arguments: Any) -> dict[str, Any]:
    start = time.perf_counter()
    answer: dict[str, Any] = work(*arguments)
    return {**answer, "seconds": time.perf_counter() - start}


def with_plain_answer(answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answers with that of no probe among them, where the one with probes brings it."""
    probed = answers.get(PROBED)
    if probed is None:
        return answers
    plain = {"error": probed["error"]} if "error" in probed else probed["without_probe"]
    rest = {key: value for key, value in probed.items() if key != "without_probe"}
    return {OURS: plain, **answers, PROBED: rest}


def compare(row: dict[str, Any], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    errors = {
        name: {
            quantity: error_share(answer.get(quantity), row[f"peak_{quantity}_bytes"])
            for quantity in QUANTITIES
            if quantity in answer or "error" in answer
        }
        for name, answer in answers.items()
    }
    return {
        **{key: row[key] for key in ("label", "family", "held_out", "num_parameters")},
        "measured": {quantity: row[f"peak_{quantity}_bytes"] for quantity in QUANTITIES},
        "estimates": answers,
        "errors": errors,
    }


def show(row: dict[str, Any]) -> str:
    cells = []
    for name, found in row["estimates"].items():
        if "error" in found:
            cells.append(f"{name} FAILED {found['error'].splitlines()[0][:100]}")
        else:
            shares = " / ".join(show_share(error) for error in row["errors"][name].values())
            cells.append(f"{name} {shares}" + (f" in {found['seconds']:.1f} s" if "seconds" in found else ""))
    mark = "held out" if row["held_out"] else "tuned"
    measured = row["measured"]
    return (
        f"{row['label']:<76} {mark:<8} {measured['allocated'] / GIB:7.3f} / {measured['reserved'] / GIB:7.3f}"
        f" GiB  {'  '.join(cells)}"
    )


def with_saved_arms(compared: list[dict[str, Any]], saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Every comparison with the answers of other arms that a saved table has for the same measurement."""
    by_label = {row["label"]: row for row in saved["rows"]}
    result = []
    for row in compared:
        old = by_label.get(row["label"], {})
        if old.get("measured") != row["measured"]:
            old = {}
        merged = {key: {**old.get(key, {}), **row[key]} for key in ("estimates", "errors")}
        result.append({**row, **merged})
    return result


def summarize_all(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Printed and returned: every estimator, both quantities."""
    result: dict[str, Any] = {}
    names = list(dict.fromkeys(name for row in compared for name in row["errors"]))
    for name in names:
        for quantity in QUANTITIES:
            answers = (row["errors"].get(name, {}).get(quantity) for row in compared)
            if name in PEERS and all(answer is None for answer in answers):
                continue  # it never speaks of reserved bytes
            summary = by_group(compared, estimator=name, quantity=quantity)
            result.setdefault(name, {})[quantity] = summary
            print(f"\n{name}, {quantity}")
            for group in ("tuned", "held out", "all"):
                print("  " + summary_line(group, summary[group]))
            if name == OURS:
                for family, found in summary["families"].items():
                    print("    " + summary_line(family, found))
    return result


def summarize_searches() -> dict[str, Any]:
    """The searches under a cap that results/ has: ours, and Lightning's under the same caps."""
    result: dict[str, Any] = {}
    ours, finder = latest_table("caps"), latest_table("lightning")
    if ours is None:
        return result
    rows = read_table(ours)["rows"]
    result["caps"] = caps_summary(rows)
    print(f"\nlargest batch under a cap: {json.dumps(result['caps'])}")
    predicted = latest_table("predictions")
    if predicted is not None:
        batches = {row["label"]: row for row in read_table(predicted)["rows"]}
        result["predicted again"] = held_against(rows, batches)
        print(f"predicted again, held against these searches: {json.dumps(result['predicted again'])}")
    if finder is not None:
        largest = {row["label"]: row["largest"] for row in rows if row.get("fails_at") is not None}
        result["lightning"] = finder_summary(read_table(finder)["rows"], largest)
        print(f"Lightning's BatchSizeFinder: {json.dumps(result['lightning'])}")
    return result


def write_predictions(arguments: argparse.Namespace) -> int:
    """`{label: {"safe": batch, "limit": batch}}` for every configuration that has a cap."""
    chosen = [
        each for each in every_configuration() if each.cap_bytes is not None and arguments.only in each.label
    ]
    tasks: list[Task] = [(each.label, _timed, (estimates.predict_largest, each)) for each in chosen]
    found: dict[str, Any] = {}
    with Pool(width=arguments.width, limit_s=arguments.child_seconds) as pool:
        for label, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            print(f"{label:<76} {answer}", flush=True)
            if "error" not in answer:
                found[label] = answer
            Path(arguments.predictions).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} of {len(chosen)} predicted")
    if arguments.save:
        save_predictions(found)
    return 0 if len(found) == len(chosen) else 1


def save_predictions(found: dict[str, Any]) -> None:
    """results/predictions_..., beside the searches under these caps."""
    searches = latest_table("caps")
    if searches is None:
        return
    result = {"benchmark": "memory", "searches": searches.name, "estimated_with": estimates.versions()}
    rows = [{"label": label, **answer} for label, answer in found.items()]
    date = datetime.date.today().isoformat()
    hardware = "-".join(str(read_table(searches)["hardware"]).lower().split())
    write_table(RESULTS / f"predictions_{hardware}_{date}.json", {**result, "rows": rows})


def without_places(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the first line of each error alone: tracebacks name folders of this machine."""
    answers = {
        name: {"error": answer["error"].splitlines()[0]} if "error" in answer else answer
        for name, answer in row["estimates"].items()
    }
    return {**row, "estimates": answers}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", help="a measured table (default: the last one in results/)")
    parser.add_argument("--only", default="", help="configurations whose label contains this")
    parser.add_argument("--tuned", action="store_true", help="leave the held-out families alone")
    parser.add_argument("--set", choices=list(SETS), default="measured", help="which set of configurations")
    parser.add_argument("--peers", action="store_true", help="also accelerate, MemTracker, 4 x parameters")
    parser.add_argument("--probe", action="store_true", help="also with the correction of the two probes")
    parser.add_argument("--width", type=int, default=2, help="estimates at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing after this long")
    parser.add_argument("--child-seconds", type=float, default=300.0, help="limit of one estimate")
    parser.add_argument("--predictions", help="write the predicted largest batches to this file, and end")
    parser.add_argument("--update", action="store_true", help="keep the other arms of the saved table")
    parser.add_argument("--save", action="store_true", help="write results/estimates_HARDWARE_DATE.json")
    arguments = parser.parse_args()
    path = Path(arguments.measured) if arguments.measured else latest_table(tables(arguments)[0])
    if path is None and not arguments.predictions:
        print("no measured table in benchmarks/memory/results; measure.py makes one on a GPU")
        return 2
    import_everything()
    if arguments.predictions:
        return write_predictions(arguments)
    assert path is not None
    return report(path, arguments)


def tables(arguments: argparse.Namespace) -> tuple[str, str]:
    """What was measured and what is estimated of it, as the files in results/ are called."""
    name = str(arguments.set)
    return ("measured", "estimates") if name == "measured" else (name, f"{name}-estimates")


def report(path: Path, arguments: argparse.Namespace) -> int:
    table = read_table(path)
    rows = [
        (configuration, row)
        for configuration, row in measured_rows(table)
        if arguments.only in configuration.label and not (arguments.tuned and configuration.held_out)
    ]
    compared = gather(rows, arguments)
    saved = latest_table(tables(arguments)[1]) if arguments.update else None
    kept: dict[str, Any] = {}
    if saved is not None:
        document = read_table(saved)
        compared = with_saved_arms(compared, document)
        kept = {key: document[key] for key in ("not_asked",) if key in document}
    summary = summarize_all(compared)
    stale, missing = unmatched(table) if arguments.set == "measured" else ([], [])
    if stale or missing:
        print(f"\nmeasured but no longer a configuration: {stale}\nnot measured: {missing}")
    hardware = str(table["device"]["name"])
    result = {
        "benchmark": "memory",
        "hardware": hardware,
        "measured": path.name,
        "measured_with": table["versions"],
        "estimated_with": estimates.versions(),
        "python": platform.python_version(),
        "summary": summary,
        **(summarize_searches() if arguments.set == "measured" else {}),
        **kept,
    }
    print(json.dumps(result))
    if arguments.save:
        name = "-".join(hardware.lower().split())
        subject = tables(arguments)[1]
        file = RESULTS / f"{subject}_{name}_{datetime.date.today().isoformat()}.json"
        write_table(file, {**result, "rows": [without_places(row) for row in compared]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
