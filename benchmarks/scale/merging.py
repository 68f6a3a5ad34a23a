"""The evidence of many ranks as one: seconds and bytes for rank 0.

    python benchmarks/scale/merging.py [--ranks 8 64 512] [--save]

Every simulated rank leaves the evidence that one job left on an H200, with a step time of its own, in a
folder that all see.  Ranks write at the same time in reality, so `publish_s` is what one of them takes.
Rank 0's part is `gather_s`; `folder_bytes` lies in the folder then; `peak_bytes` is what Python took.  The
run fails where that is more than the limits, or grows faster than the number of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from interleaved import report  # noqa: E402

from flatout.measure.evidence import Evidence  # noqa: E402
from flatout.measure.evidence_file import load_evidence, save_evidence  # noqa: E402
from flatout.measure.run.ranks.exchange import Exchange  # noqa: E402

RECORDED = ROOT / "tests" / "data" / "darkroom_h200.json"
PER_NODE = 8
MOST_S, MOST_BYTES = 10.0, 50e6


def of_rank(recorded: Evidence, rank: int, world_size: int) -> Evidence:
    slower = 1 + random.Random(rank).random() / 10
    steps = tuple(dataclasses.replace(step, step_s=step.step_s * slower) for step in recorded.steps)
    node = rank // PER_NODE
    job = dataclasses.replace(
        recorded.job, rank=rank, world_size=world_size, host=f"gpu-node-{node}", node=node
    )
    return dataclasses.replace(recorded, job=job, steps=steps)


def measure(recorded: Evidence, num_ranks: int, folder: Path) -> dict[str, Any]:
    os.environ.update(WORLD_SIZE=str(num_ranks), MASTER_ADDR="simulated", MASTER_PORT=str(num_ranks))
    path = folder / str(num_ranks) / "evidence.json"
    took_s = []
    for rank in range(num_ranks):
        os.environ["RANK"] = str(rank)
        exchange = Exchange(path)
        exchange.begin()
        if rank == 0:
            first = exchange
            continue
        evidence = of_rank(recorded, rank, num_ranks)
        began_s = time.perf_counter()
        exchange.publish(evidence)
        took_s.append(time.perf_counter() - began_s)
    os.environ["RANK"] = "0"
    folder_bytes = sum(each.stat().st_size for each in path.parent.rglob("rank-*"))
    own = of_rank(recorded, 0, num_ranks)
    began_s = time.perf_counter()
    merged = first.gather(own, timeout_s=0.0)
    save_evidence(merged, path)
    gather_s = time.perf_counter() - began_s
    assert len(merged.ranks) == num_ranks, merged.missing
    tracemalloc.start()
    first.gather(own, timeout_s=0.0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    first.clear()
    return {
        "publish_s": sorted(took_s)[len(took_s) // 2],
        "gather_s": gather_s,
        "folder_bytes": folder_bytes,
        "peak_bytes": peak_bytes,
        "evidence_bytes": path.stat().st_size,
        "folder_bytes_per_rank": folder_bytes / (num_ranks - 1),
        "gather_s_per_rank": gather_s / num_ranks,
    }


def check(rows: list[dict[str, Any]]) -> None:
    first, last = rows[0], rows[-1]
    assert last["gather_s"] < MOST_S and last["folder_bytes"] + last["peak_bytes"] < MOST_BYTES, last
    for name in ("gather_s_per_rank", "folder_bytes_per_rank"):
        assert last[name] < 1.1 * first[name], (first, last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    recorded = load_evidence(RECORDED)
    with tempfile.TemporaryDirectory() as folder:
        measure(recorded, 2, Path(folder))  # imports and caches
        rows = {f"{num} ranks": measure(recorded, num, Path(folder)) for num in options.ranks}
    for name, row in rows.items():
        print(f"{name:>10}: {row['gather_s']:.3f} s, {row['folder_bytes'] / 1e6:.2f} MB in the folder")
    check([*rows.values()])
    report("merging", rows, folder=Path(__file__).parent, save=options.save)


if __name__ == "__main__":
    main()
