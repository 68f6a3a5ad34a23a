"""One figure of several runs that differ by their seed: its mean, with the 95 % interval of Student's t.

    python benchmarks/seeds.py runs/seed-*/evaluation.json --figure routing/accuracy_share \
        --figure 'scores/*/by_task/*/*' --save benchmarks/adapters/results/real-seeds_nvidia-h200.json
    python benchmarks/seeds.py learn-arithmetic-seed*.json --figure curve/-1/held_out

A figure is named by the keys on its way into the JSON file; a number counts into a list, and `*` is every key
there.  Of two or three runs the interval is wide, and that is the point: one run says nothing of the next.
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


def figures_in(document: Any, pattern: str) -> dict[str, float]:
    """Return the numbers at the paths of a pattern, in which `*` is every key."""
    found = {"": document}
    for wanted in pattern.split("/"):
        found = {
            f"{path}/{key}" if path else str(key): inner[key]
            for path, inner in found.items()
            for key in _keys(inner, wanted)
        }
    return {path: float(value) for path, value in found.items() if isinstance(value, int | float)}


def _keys(document: Any, wanted: str) -> list[Any]:
    if isinstance(document, list):
        return list(range(len(document))) if wanted == "*" else [int(wanted)]
    return list(document) if wanted == "*" else [wanted]


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
    known = [
        {path: value for pattern in options.figure for path, value in figures_in(document, pattern).items()}
        for document in documents
    ]
    found = {path: mean_interval([figures[path] for figures in known]) for path in known[0]}
    for path, one in found.items():
        print(f"{path:<44} {one['mean']:.4g} [{one['low']:.4g}, {one['high']:.4g}]  {one['values']}")
    result = {"benchmark": "seeds", "files": [str(path) for path in options.files], "figures": found}
    print(json.dumps(result))
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
