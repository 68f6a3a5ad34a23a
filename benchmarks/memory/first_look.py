"""A set of families that nothing was made from: estimated first, then measured, then compared, once.

    python benchmarks/memory/first_look.py --predict --save       # anywhere, before anything is measured
    python benchmarks/memory/first_look.py --repair --save        # again what could not be estimated
    python benchmarks/memory/measure.py --set unseen-second --width 6 --out measured.json      # on a GPU
    python benchmarks/memory/first_look.py --measured measured.json --save

`--predict` writes results/SET-predictions_...; the file is committed before the GPU is asked, so that nobody
can say that a rule was made from the answer.  What fails is a failure of the first look; `--repair` adds
what the estimator says of it once it can, still before the measurement, as an arm of its own.  The comparison
takes its bytes from that file and estimates nothing again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory import estimates  # noqa: E402
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import SETS  # noqa: E402
from benchmarks.memory.preparation import import_everything  # noqa: E402
from benchmarks.memory.run import OURS, compare, show, summarize_all  # noqa: E402
from benchmarks.memory.table import RESULTS, latest_table, measured_rows, read_table, write_table  # noqa: E402

GIB = 2**30
HARDWARE = "NVIDIA H200"
REPAIRED = "flatout, failures repaired"
BY_INDUCTOR = "inductor's plan"


def predict(name: str, *, width: int) -> list[dict[str, Any]]:
    """One row for each configuration, in the order of the set; what fails says with which error."""
    chosen = SETS[name]()
    found = estimate_all(chosen, width=width)
    return [{"label": each.label, "family": each.family, **found[each.label]} for each in chosen]


def repair(name: str, rows: list[dict[str, Any]], *, width: int) -> list[dict[str, Any]]:
    failed = {row["label"] for row in rows if "error" in row}
    found = estimate_all([each for each in SETS[name]() if each.label in failed], width=width)
    return [{**row, "repaired": found[row["label"]]} if row["label"] in failed else row for row in rows]


def estimate_all(chosen: list[Configuration], *, width: int) -> dict[str, dict[str, Any]]:
    tasks: list[Task] = [(each.label, estimates.estimate, (each,)) for each in chosen]
    found: dict[str, dict[str, Any]] = {}
    with Pool(width=width, limit_s=300) as pool:
        for label, answer in pool.run(tasks, deadline=time.monotonic() + 3600):
            found[label] = without_places(answer)
            print(f"{label:<76} {shown(answer)}", flush=True)
    return found


def without_places(answer: dict[str, Any]) -> dict[str, Any]:
    """The first line of an error without the place it was raised at, which names folders of this machine."""
    return {"error": answer["error"].partition(" (at ")[0].splitlines()[0]} if "error" in answer else answer


def shown(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"FAILED {answer['error'].splitlines()[0][:100]}"
    return f"{answer['allocated'] / GIB:7.3f} / {answer['reserved'] / GIB:7.3f} GiB"


def compare_all(
    table: dict[str, Any], predictions: dict[str, Any], plan: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Each measured configuration beside what was predicted of it, and what inductor's plan says."""
    predicted = {row["label"]: row for row in predictions["rows"]}
    planned = {row["label"]: row for row in (plan or {"rows": []})["rows"]}
    compared = []
    kept = ("allocated", "reserved", "error")
    for configuration, row in measured_rows(table):
        first = predicted[configuration.label]
        arms = {OURS: first, REPAIRED: first.get("repaired", first)}
        if configuration.label in planned:
            arms = {OURS: first, BY_INDUCTOR: planned[configuration.label]}
        answers = {name: {key: arm[key] for key in kept if key in arm} for name, arm in arms.items()}
        compared.append(compare(row, answers))
        print(show(compared[-1]))
    return compared


def save(subject: str, result: dict[str, Any]) -> None:
    hardware = "-".join(HARDWARE.lower().split())
    path = RESULTS / f"{subject}_{hardware}_{datetime.date.today().isoformat()}.json"
    write_table(path, result)
    print(f"wrote {path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), default="unseen-second")
    parser.add_argument("--predict", action="store_true", help="estimate, and compare with nothing")
    parser.add_argument("--repair", action="store_true", help="estimate again what failed")
    parser.add_argument("--measured", help="what measure.py wrote (default: the last one in results/)")
    parser.add_argument("--width", type=int, default=2, help="estimates at a time")
    parser.add_argument("--save", action="store_true", help="write it to results/")
    arguments = parser.parse_args()
    name = str(arguments.set)
    head = {"benchmark": "memory", "hardware": HARDWARE}
    predictions = latest_table(f"{name}-predictions")
    if arguments.predict or (arguments.repair and predictions is not None):
        import_everything()
        if arguments.predict or predictions is None:
            rows = predict(name, width=arguments.width)
        else:
            rows = repair(name, read_table(predictions)["rows"], width=arguments.width)
        if arguments.save:
            save(f"{name}-predictions", {**head, "estimated_with": estimates.versions(), "rows": rows})
        return 0
    path = Path(arguments.measured) if arguments.measured else latest_table(name)
    if path is None or predictions is None:
        print(f"results/ has no {name} and {name}-predictions to compare")
        return 2
    table = read_table(path)
    plan = latest_table(f"{name}-inductor-plan")
    compared = compare_all(table, read_table(predictions), read_table(plan) if plan else None)
    result = {
        **head,
        "predictions": predictions.name,
        "measured_with": table["versions"],
        "estimated_with": read_table(predictions)["estimated_with"],
        "summary": summarize_all(compared),
    }
    print(json.dumps(result))
    if arguments.save:
        save(f"{name}-first-look", {**result, "rows": compared})
    return 0


if __name__ == "__main__":
    sys.exit(main())
