"""One figure of several runs that differ by their seed: its mean, with the 95 % interval of Student's t.

    python benchmarks/seeds.py runs/seed-*/evaluation.json --figure routing/accuracy_share \
        --figure scores/1/by_task/qa/f1 --save benchmarks/adapters/results/real-seeds_nvidia-h200.json
    python benchmarks/seeds.py learn-arithmetic-seed*.json --figure curve/-1/held_out

A figure is named by the keys on its way into the JSON file; a number counts into a list.  Of two or three
runs the interval is wide, and that is the point: one run says nothing of the next.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

# Two-sided 95 % of Student's t, by the number of runs.
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def mean_interval(values: list[float]) -> dict[str, Any]:
    """Return the mean of two to ten values and the interval that holds the true one."""
    mean = statistics.fmean(values)
    half = QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "values": values}


def figure_in(document: Any, path: str) -> float:
    for key in path.split("/"):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return float(document)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--figure", action="append", required=True, metavar="PATH")
    parser.add_argument("--save", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    if len(options.files) not in QUANTILES:
        parser.error(f"{len(options.files)} files; give 2 to {max(QUANTILES)}")
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    found = {
        path: mean_interval([figure_in(document, path) for document in documents]) for path in options.figure
    }
    for path, one in found.items():
        print(f"{path:<44} {one['mean']:.4g} [{one['low']:.4g}, {one['high']:.4g}]  {one['values']}")
    result = {"benchmark": "seeds", "files": [str(path) for path in options.files], "figures": found}
    print(json.dumps(result))
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
