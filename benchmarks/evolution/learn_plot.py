"""The curves of `learn.py` as one picture.

cd benchmarks/evolution
python learn_plot.py results/learn-*_2026-11-15.json ../../docs/images/evolution_learns.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {"digit-copy": "copy four digits", "arithmetic": "sums of numbers below 100"}


def main() -> None:
    *sources, target = map(Path, sys.argv[1:])
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sources]
    figure = Figure(figsize=(4.6 * len(runs), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        seconds = [point["seconds"] for point in run["curve"]]
        scores = [point["held_out"] for point in run["curve"]]
        axes.plot(seconds, scores, color="#c8553d", marker="o", markersize=3, label="evolution")
        axes.axhline(scores[0], color="#7a9a4a", linestyle="--", label="untrained")
        if "random_search" in run:
            found = run["random_search"]["held_out"]
            axes.axhline(found, color="#3f7fb5", linestyle=":", label="random search, same budget")
        axes.set(xlabel="seconds", ylabel="held-out score", ylim=(0, 1.05))
        axes.set_title(TITLES.get(run["task"], run["task"]), fontsize=10)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    first = runs[0]
    figure.suptitle(
        f"{first['model']}, population {first['population']}, one {first['hardware']}", fontsize=10
    )
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main()
