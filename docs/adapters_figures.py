"""The table of adapters.md, made from the result files of the benchmark (`tables`).

Behind `<!-- adapters: speed -->` in the page stands how fast adapters train in one pass, from the latest
result of each model, hardware and number of tokens.  Each column names both of its arms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import fill, in_order

RESULTS = Path(__file__).parents[1] / "benchmarks" / "adapters" / "results"
MODELS = {"minilm": "MiniLM", "roberta-base": "RoBERTa-base"}
SEQUENTIAL, RECORDED = "sequential", "sequential graph"
NOT_MEASURED = "*Not measured yet.*"

Result = dict[str, Any]


def with_tables(markdown: str, *, folder: Path = RESULTS) -> str:
    return fill(markdown, {"speed": speed}, owner="adapters", folder=folder)


def speed(folder: Path) -> str:
    """Return one row for each model, hardware and number of tokens."""
    lines = [
        "| model, hardware, tokens per task | eager, of eager | graph, of eager | graph, of graph |",
        "|---|--:|--:|--:|",
    ]
    for shape, name in MODELS.items():
        latest: dict[tuple[str, int], Result] = {}
        for path in in_order(folder, f"adapters-{shape}_*.json"):
            result = json.loads(path.read_text(encoding="utf-8"))
            shown = result["shapes"][0]
            subject = f"{name}{'' if shown['real_weights'] else ', random weights'}, {result['hardware']}"
            latest |= {(subject, size["tokens"]): size for size in shown["sizes"]}
        lines += [_row(subject, size) for (subject, _), size in latest.items()]
    return "\n".join(lines) if len(lines) > 2 else NOT_MEASURED


def _row(subject: str, size: Result) -> str:
    times = size["of_base"]
    cells = [_shown(times.get("fused")), _shown(times.get("fused graph"))]
    recorded = times.get(RECORDED)
    graphs = times["fused graph"]["ratio"] / recorded["ratio"] if recorded else None
    return f"| {subject}, {size['tokens']:,} | {' | '.join(cells)} | {f'{graphs:.1f}' if graphs else ''} |"


def _shown(found: Result | None) -> str:
    return f"{found['ratio']:.1f} [{found['low']:.1f}, {found['high']:.1f}]" if found else ""
