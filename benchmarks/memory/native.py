"""How far native estimates are from what a GPU measured, beside those made by rules on a CPU.

    python benchmarks/memory/native.py --sets measured,unseen,unseen-second --width 12 --out native.json

Runs on a machine with a GPU, the kind that the committed tables were measured on: every configuration is
traced on tensors without data of CUDA, each in a process of its own, the longest ones first.  What fails or
takes too long is counted and named.  The rules' estimates are those committed in results/, or with `--rules`
made again here, so that both arms have the same versions.  Prints a table, then one JSON line.  The file
written is results/native_HARDWARE_DATE.json once it is copied there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a parent that asked CUDA could not fork

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory.accuracy import QUANTITIES, summarize  # noqa: E402
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import SETS  # noqa: E402
from benchmarks.memory.preparation import import_everything, versions  # noqa: E402
from benchmarks.memory.run import OURS, compare, without_places  # noqa: E402
from benchmarks.memory.table import latest_table, measured_rows, read_table, write_table  # noqa: E402

NATIVE = "flatout, natively"
EAGER = tuple(name for name in SETS if name != "compiled")  # a compiled model is traced eagerly, either way
Rows = list[tuple[str, Configuration, dict[str, Any]]]  # (set, configuration, what was measured of it)


def estimate_natively(configuration: Configuration) -> dict[str, Any]:
    return _estimated(configuration, native=True)


def estimate_by_rules(configuration: Configuration) -> dict[str, Any]:
    return _estimated(configuration, native=False)


def _estimated(configuration: Configuration, *, native: bool) -> dict[str, Any]:
    from flatout.memory.predict.forecast import estimate_job

    start_s = time.perf_counter()
    device = None if native else "H200"
    found = estimate_job(configuration.job, configuration.recipe, device=device, native=native)
    return {
        "allocated": found.peak_allocated_bytes,
        "reserved": found.peak_reserved_bytes,
        "seconds": time.perf_counter() - start_s,
    }


def gpu_here() -> dict[str, Any]:
    """Asked in a child: a process that has asked CUDA cannot fork ones that use it."""
    import torch

    from flatout.memory.process.isolated_process import check_cuda

    check_cuda(0, what="a native trace")
    return {"name": torch.cuda.get_device_name(0)}


def saved_answers(name: str) -> dict[str, dict[str, Any]]:
    """The committed answers of the rules for one set, by label; without those of another measurement."""
    path = latest_table("estimates" if name == "measured" else f"{name}-estimates")
    rows = [] if path is None else read_table(path)["rows"]
    return {row["label"]: {**row["estimates"][OURS], "of": row["measured"]} for row in rows}


def rows_of(sets: list[str], *, only: str) -> Rows:
    found: Rows = []
    for name in sets:
        path = latest_table(name)
        if path is not None:
            measured = measured_rows(read_table(path))
            found += [(name, each, row) for each, row in measured if only in each.label]
    return found


def gather(rows: Rows, arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Answers by label and arm; the saved ones say how long each takes."""
    answers: dict[str, dict[str, dict[str, Any]]] = {each.label: {} for _, each, _ in rows}
    for name in {name for name, _, _ in rows}:
        saved = saved_answers(name)
        for _, each, row in (entry for entry in rows if entry[0] == name):
            answer = saved.get(each.label)
            if answer and answer.pop("of") == {key: row[f"peak_{key}_bytes"] for key in QUANTITIES}:
                answers[each.label][OURS] = answer
    slowest = sorted(rows, key=lambda entry: -answers[entry[1].label].get(OURS, {}).get("seconds", 0.0))
    work = {NATIVE: estimate_natively, **({OURS: estimate_by_rules} if arguments.rules else {})}
    tasks: list[Task] = [
        (f"{arm}|{each.label}", task, (each,)) for _, each, _ in slowest for arm, task in work.items()
    ]
    with Pool(width=arguments.width, limit_s=arguments.child_seconds) as pool:
        for key, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            arm, label = key.split("|", 1)
            answers[label][arm] = answer
    return answers


def summarize_all(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """By set and arm; of the rules only the configurations that were answered natively as well."""
    result: dict[str, Any] = {}
    for name in [*dict.fromkeys(row["set"] for row in compared), "all"]:
        chosen = [row for row in compared if name in (row["set"], "all")]
        for quantity in QUANTITIES:
            native = [row["errors"][NATIVE].get(quantity) for row in chosen]
            ruled = [
                row["errors"].get(OURS, {}).get(quantity)
                for row, error in zip(chosen, native, strict=True)
                if error is not None
            ]
            arms = {NATIVE: summarize(native), OURS: summarize(error for error in ruled if error is not None)}
            result.setdefault(name, {})[quantity] = arms
    return result


def show(summary: dict[str, Any]) -> None:
    print(f"{'set':<16}{'':<11}{'':<20}{'n':>4}{'failed':>8}{'median':>9}{'p95':>9}{'worst':>9}{'under':>7}")
    for name, quantities in summary.items():
        for quantity, arms in quantities.items():
            for arm, found in arms.items():
                keys = ("median", "p95", "worst")
                cells = "".join(
                    f"{100 * found[key]:>8.2f}%" if key in found else f"{'n/a':>9}" for key in keys
                )
                under = f"{100 * found['under_share']:>6.0f}%" if "under_share" in found else f"{'n/a':>7}"
                head = f"{name:<16}{quantity:<11}{arm:<20}{found['count']:>4}{found['failed']:>8}"
                print(head + cells + under)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default=",".join(EAGER), help="sets of configurations, a,b")
    parser.add_argument("--only", default="", help="configurations whose label contains this")
    parser.add_argument("--rules", action="store_true", help="also estimate by the rules here")
    parser.add_argument("--width", type=int, default=4, help="estimates at a time, each with a context")
    parser.add_argument("--seconds", type=float, default=90.0, help="start nothing after this long")
    parser.add_argument("--child-seconds", type=float, default=60.0, help="limit of one estimate")
    parser.add_argument("--out", type=Path, help="write the comparison to this file")
    arguments = parser.parse_args()
    sets = str(arguments.sets).split(",")
    if unknown := set(sets) - set(SETS):
        print(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
        return 2
    start_s = time.perf_counter()
    import_everything()
    with Pool(width=1, limit_s=60) as pool:
        gpu = pool.one(gpu_here, ())
    if "error" in gpu:
        print(f"no GPU to trace on: {gpu['error'].splitlines()[0]}")
        return 2
    rows = rows_of(sets, only=arguments.only)
    return report(rows, gather(rows, arguments), arguments, hardware=gpu["name"], start_s=start_s)


def report(
    rows: Rows,
    answers: dict[str, dict[str, dict[str, Any]]],
    arguments: argparse.Namespace,
    *,
    hardware: str,
    start_s: float,
) -> int:
    not_asked = [each.label for _, each, _ in rows if NATIVE not in answers[each.label]]
    compared = [
        without_places({"set": name, **compare(row, answers[each.label])})
        for name, each, row in rows
        if NATIVE in answers[each.label]
    ]
    for row in compared:
        answer = row["estimates"][NATIVE]
        if "error" in answer:
            print(f"FAILED {row['label']}: {answer['error'][:140]}")
    summary = summarize_all(compared)
    show(summary)
    result = {
        "benchmark": "memory",
        "hardware": hardware,
        "date": datetime.date.today().isoformat(),
        "estimated_with": versions(),
        "rules_made_here": bool(arguments.rules),
        "seconds": round(time.perf_counter() - start_s, 1),
        "not_asked": not_asked,
        "summary": summary,
    }
    print(json.dumps(result))
    if arguments.out is not None:
        partial = arguments.out.with_name(arguments.out.name + ".part")
        write_table(partial, {**result, "rows": compared})
        partial.replace(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
