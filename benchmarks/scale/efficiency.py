"""Two workers against one, and where the rest of the second goes.

    python benchmarks/scale/efficiency.py [--rounds 1] [--tuning] [--save]

A search is run by one worker and by two, in turn.  Its judge waits 30 ms for each text, as if the work were
done by a GPU of the worker's own.  The rows of both workers are looked at twenty times a second, which gives
the parts of what is lost:

    start   until the second worker answers its first row, the first one works alone
    end     the last bracket of one worker is waited for by the other
    slower  rows a second of both together, against twice those of one alone

Of a tuning on Ray, one node is held against two.  What a second node cannot take over: the start and the end,
trials that wait for an answer, and those that ran ahead and were not asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(Path(__file__).parent)]
from faults_search import LIMIT_S, SCRIPT, Command, Search, diagnose  # noqa: E402
from interleaved import report  # noqa: E402

from tests.support.two_nodes import TwoNodes  # noqa: E402

LOOK_S = 0.05
TRIALS = 80


def run_search(folder: Path, *, workers: int) -> dict[str, Any]:
    """Seconds from the first row to the last of the search, and those of each worker."""
    folder.mkdir()
    search = Search(folder, workers=workers, trials=TRIALS)
    (folder / "go").touch()
    search.start()
    seen: dict[str, list[tuple[float, int]]] = {}
    while search.process.poll() is None and "testing the winner" not in search.log.read_text():
        for path in search.out.glob("rows/*.jsonl"):
            number = path.read_bytes().count(b"\n")
            held = seen.setdefault(path.stem, [])
            if number and (not held or held[-1][1] != number):
                held.append((time.monotonic(), number))
        time.sleep(LOOK_S)
    if search.process.wait():
        raise RuntimeError(search.log.read_text()[-1000:])
    spans = {name: (held[0][0], held[-1][0], held[-1][1]) for name, held in seen.items() if held}
    return {"spans": spans, "rows": sum(number for _, _, number in spans.values())}


def compare(alone: dict[str, Any], together: dict[str, Any]) -> dict[str, Any]:
    """What two workers gain, of two, and the parts of what they do not."""
    (began_s, ended_s, rows), *_ = alone["spans"].values()
    rate = rows / (ended_s - began_s)
    starts, ends = ([span[place] for span in together["spans"].values()] for place in (0, 1))
    took_s = max(ends) - min(starts)
    gained = together["rows"] / took_s / rate
    both_s = min(ends) - max(starts)
    start, end = (max(starts) - min(starts)) / took_s / 2, (max(ends) - min(ends)) / took_s / 2
    return {
        "speedup": gained,
        "efficiency": gained / 2,
        "lost_start": start,
        "lost_end": end,
        "lost_slower": 1 - gained / 2 - start - end,
        "both_s": both_s,
        "alone_s": ended_s - began_s,
        "together_s": took_s,
    }


def run_tuning(folder: Path, *, nodes: int) -> dict[str, Any]:
    """Seconds of a tuning whose trials run on so many nodes."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    diagnose(folder)
    with TwoNodes(nodes=nodes) as cluster:
        given = ("--evidence", "evidence.json", "--only", "loader-workers", "--only", "garbage-every")
        tune = Command(
            folder, "tune", *given, "--ray", cluster.address, "train.py", environment=cluster.environment
        )
        began_s = time.monotonic()
        tune.start()
        code = tune.process.wait(timeout=LIMIT_S)
    return {"exit_code": code, "seconds": time.monotonic() - began_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tuning", action="store_true", help="also a tuning on one node and on two")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.rounds):
            alone, together = (run_search(folder / f"{number}-{each}", workers=each) for each in (1, 2))
            rows[f"search, round {number}"] = {
                **compare(alone, together),
                "load": os.getloadavg()[0],
                "cores": os.cpu_count(),
            }
        if options.tuning:
            one, two = (run_tuning(folder / f"tuning-{each}", nodes=each) for each in (1, 2))
            speedup = one["seconds"] / two["seconds"]
            rows["tuning"] = {"one": one, "two": two, "speedup": speedup, "efficiency": speedup / 2}
    for row, found in rows.items():
        lost = ", ".join(f"{part[5:]} {found[part]:.0%}" for part in found if part.startswith("lost_"))
        print(f"{row:<18} {found['speedup']:.2f}x of 2 {f'(lost: {lost})' if lost else ''}")
    report("efficiency", rows, folder=Path(__file__).parent, save=options.save)


if __name__ == "__main__":
    main()
