"""Where reserved bytes miss: the estimates of all sets, by the layers of their models.

    python benchmarks/memory/by_layers.py --save     # anywhere: reads results/, builds models without data

A model counts as one with convolutions if a kernel has more than one position or the channels come in groups;
else as one with kernels of one position, or with recurrent layers; else as one of neither.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory.configurations import SETS  # noqa: E402
from benchmarks.memory.first_look import HARDWARE, save  # noqa: E402
from benchmarks.memory.preparation import import_everything  # noqa: E402
from benchmarks.memory.run import OURS  # noqa: E402
from benchmarks.memory.table import latest_table, read_table  # noqa: E402

# the latest estimates of each measured set
ESTIMATES = {
    "measured": "estimates",
    **{name: f"{name}-estimates" for name in ("unseen", "unseen-second", "unseen-third", "unseen-fourth")},
}
KINDS = ("convolutions", "kernels of one position", "recurrent layers", "neither")


def kind_of(model: Any) -> str:
    from torch import nn

    convolutions = [part for part in model.modules() if isinstance(part, nn.modules.conv._ConvNd)]
    if any(max(part.kernel_size) > 1 or part.groups > 1 for part in convolutions):
        return KINDS[0]
    if convolutions:
        return KINDS[1]
    is_recurrent = any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in model.modules())
    return KINDS[2] if is_recurrent else KINDS[3]


def errors_by_kind() -> dict[str, list[float]]:
    import torch

    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, subject in ESTIMATES.items():
        path = latest_table(subject)
        assert path is not None
        rows = {row["label"]: row["errors"][OURS]["reserved"] for row in read_table(path)["rows"]}
        for configuration in SETS[name]():
            if (error := rows.get(configuration.label)) is not None:
                with torch.device("meta"):
                    found[kind_of(configuration.job.make_model())].append(error)
    return found


def summary(errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "count": len(errors),
        "p95": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "worst": sizes[-1],
        "under_1_percent": sum(error < -0.01 for error in errors) / len(errors),
        "under_2_percent": sum(error < -0.02 for error in errors) / len(errors),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write it to results/")
    arguments = parser.parse_args()
    import_everything()
    warnings.filterwarnings("ignore")
    rows = [{"layers": kind, **summary(errors)} for kind, errors in errors_by_kind().items()]
    for row in rows:
        print(json.dumps(row))
    if arguments.save:
        save("by-layers", {"benchmark": "memory", "hardware": HARDWARE, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
