"""The truth: what every configuration really takes on this machine's GPU.

    python benchmarks/memory/measure.py --out measured.json [--histories histories.npz] [--seconds 500]
    python benchmarks/memory/measure.py --caps --predictions predictions.json --out caps.json

Each configuration runs in a child of its own, forked from a parent that has imported everything and never
touched CUDA: a fresh context and allocator for every one, and an out-of-memory costs only that one.  The
output file is rewritten after each configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a parent with a CUDA context could not fork

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory.children import Pool  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import of_sets  # noqa: E402
from benchmarks.memory.history import append_history  # noqa: E402
from benchmarks.memory.preparation import base_bytes, describe, import_everything, versions, write  # noqa: E402

GIB = 2**30


def selected(arguments: argparse.Namespace) -> list[Configuration]:
    words = arguments.only.split(",")
    chosen = [each for each in of_sets(arguments.set) if any(word in each.label for word in words)]
    if arguments.skip:
        rows = json.loads(Path(arguments.skip).read_text())["rows"]
        done = {row["label"] for row in rows if "error" not in row}
        chosen = [each for each in chosen if each.label not in done]
    if arguments.caps:
        chosen = [each for each in chosen if each.cap_bytes is not None]
    return chosen


def show(row: dict[str, Any], *, number: int, total: int) -> str:
    head = f"[{number}/{total}] {row['label']:<72}"
    if "error" in row:
        return f"{head} FAILED {row['error'].splitlines()[0][:150]}"
    seconds = f"  {row['seconds']:.1f} s"
    if "largest" in row:
        trains = {True: "trains", False: "FAILS", None: "untried"}[row["safe_trains"]]
        return (
            f"{head} cap {row['cap_bytes'] / GIB:.0f} GiB: safe {row['safe']} {trains}, limit {row['limit']},"
            f" largest {row['largest']}, fails at {row['fails_at']}, {len(row['tried'])} tries{seconds}"
        )
    allocated, reserved = row["peak_allocated_bytes"] / GIB, row["peak_reserved_bytes"] / GIB
    return (
        f"{head} allocated {allocated:7.3f} reserved {reserved:7.3f} GiB"
        f"  step {row['step_s'] * 1e3:6.0f} ms  {row['num_parameters'] / 1e6:6.0f} M{seconds}"
    )


def tasks_of(arguments: argparse.Namespace) -> list[tuple[str, Any, tuple[Any, ...]]]:
    from benchmarks.memory import largest, measurement

    configurations = selected(arguments)
    if arguments.caps:
        predictions = json.loads(Path(arguments.predictions).read_text()) if arguments.predictions else {}
        return [
            (
                each.label,
                largest.search,
                (each, predictions.get(each.label, {}), arguments.cap_seconds),
            )
            for each in configurations
        ]
    record = arguments.histories is not None
    return [
        (
            each.label,
            measurement.measure,
            (each, arguments.steps, record and arguments.history_only in each.label),
        )
        for each in configurations
    ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.memory import constants

    start = time.monotonic()
    out = Path(arguments.out)
    base = base_bytes()
    document: dict[str, Any] = {"versions": versions(), "base_bytes": base, "rows": []}
    with Pool(width=1, limit_s=arguments.child_seconds) as pool:
        document["device"] = pool.one(constants.measure_constants, (base,))
    write(out, document)
    print(json.dumps(document["device"]), flush=True)
    if "error" in document["device"]:
        return document
    by_label = {each.label: each for each in selected(arguments)}
    tasks = tasks_of(arguments)
    with Pool(width=arguments.width, limit_s=arguments.child_seconds) as pool:
        deadline = start + arguments.seconds
        for number, (label, answer) in enumerate(pool.run(tasks, deadline=deadline), start=1):
            history = answer.pop("history", None)
            row = {**describe(by_label[label]), **answer}
            used = row.pop("driver_used_bytes", None)
            if used is not None and base is not None and arguments.width == 1:  # else others' memory is in it
                row["context_bytes"] = used - base - row["end_reserved_bytes"]
            if history is not None:
                row["history"] = append_history(Path(arguments.histories), label, history)
            document["rows"].append(row)
            write(out, document)
            print(show(row, number=number, total=len(tasks)), flush=True)
    document["seconds"] = time.monotonic() - start
    write(out, document)
    failed = [row["label"] for row in document["rows"] if "error" in row]
    done, seconds = len(document["rows"]), document["seconds"]
    print(f"{done} of {len(tasks)} in {seconds:.0f} s, {len(failed)} failed: {failed}", flush=True)
    return document


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="JSON file, rewritten after every configuration")
    parser.add_argument("--only", default="", help="configurations whose label contains one of these, a,b")
    parser.add_argument("--set", default="measured", help="which set of configurations, or several: a,b")
    parser.add_argument("--skip", help="an earlier output file: what it has measured is not run again")
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing after this long")
    parser.add_argument("--child-seconds", type=float, default=60.0, help="limit of one configuration")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=1, help="children at a time (times and context: only 1)")
    parser.add_argument("--histories", help="npz file for the sequence of allocations of two steps")
    parser.add_argument("--history-only", default="", help="histories only where the label contains this")
    parser.add_argument("--caps", action="store_true", help="find the largest batch under each cap instead")
    parser.add_argument("--predictions", help='JSON: {label: {"safe": batch, "limit": batch}}')
    parser.add_argument("--cap-seconds", type=float, default=20.0, help="time for one search")
    arguments = parser.parse_args()
    if arguments.histories:
        Path(arguments.histories).unlink(missing_ok=True)
    import_everything()
    document = run(arguments)
    return 0 if any("error" not in row for row in document["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
