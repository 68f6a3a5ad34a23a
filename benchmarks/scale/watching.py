"""64 nodes at one sample a second on one page: its CPU time, how late figures are, and what a restart loses.

    python benchmarks/scale/watching.py [--nodes 64] [--seconds 30] [--save]

The nodes are simulated: a thread writes the log of each, whose loss counts its samples.  In the arm `folder`
all of them lie in one folder; in the arm `pages` each is served by a page of its own, in this process.  The
page of all is a `flatout watch --web --from ...` beside it, with one browser.  Lateness is the time from the
writing of a sample until its figure is in that browser's stream.  Then the page is killed and started again,
and a node is opened: samples of it that the page does not show are lost.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from interleaved import report  # noqa: E402

from flatout.ground.runs import create_run  # noqa: E402
from flatout.monitor.past.history import HistoryWriter  # noqa: E402
from flatout.monitor.web.server import PageServer  # noqa: E402
from tests.support.monitor_web import Listener, run, sample  # noqa: E402


class Nodes(threading.Thread):
    """Writes one sample a second for every node, spread over the second."""

    def __init__(self, root: Path, num: int) -> None:
        super().__init__(daemon=True)
        self.folders = [create_run(run(pid=number + 1, host=f"node-{number}"), root) for number in range(num)]
        self.writers = [HistoryWriter(folder) for folder in self.folders]
        self.written_s: dict[tuple[str, int], float] = {}
        self.is_over = threading.Event()

    def run(self) -> None:
        began_s, number = time.time(), 0
        while not self.is_over.is_set():
            for place, writer in enumerate(self.writers):
                due_s = began_s + number + place / len(self.writers)
                self.is_over.wait(max(0.0, due_s - time.time()))
                made = sample(float(number))
                job = None if made.job is None else dataclasses.replace(made.job, loss=float(number + 1))
                writer(dataclasses.replace(made, time_s=time.time(), job=job))
                self.written_s[f"node-{place}", number + 1] = time.time()
            number += 1


@contextlib.contextmanager
def page_of(sources: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "flatout", "watch", "--web"]
    command += [word for source in sources for word in ("--from", source)]
    page = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert page.stderr is not None
    try:
        said = page.stderr.readline()
        yield psutil.Process(page.pid), next(word for word in said.split() if word.startswith("http"))
    finally:
        page.kill()
        page.communicate()


def look(url: str, nodes: Nodes, seconds: float, process: psutil.Process) -> dict[str, Any]:
    """Read the stream for a while."""
    seen: set[tuple[str, int]] = set()
    late_s: list[float] = []
    with Listener(url) as browser:
        events = browser.events()
        began_s, cpu_s = time.time(), sum(process.cpu_times()[:2])
        num_bytes = 0
        while time.time() - began_s < seconds:
            event = next(events)
            if event.name != "runs":
                continue
            num_bytes += len(json.dumps(event.data))
            for entry in event.data["runs"]:
                figure = (entry["node"], int(entry.get("loss", 0)))
                if figure not in seen and nodes.written_s.get(figure, 0.0) > began_s:
                    late_s.append(time.time() - nodes.written_s[figure])
                seen.add(figure)
        took_s, cpu_s = time.time() - began_s, sum(process.cpu_times()[:2]) - cpu_s
    return {
        "nodes_seen": len({node for node, _ in seen}),
        "cpu_share_of_a_core": cpu_s / took_s,
        "late_median_s": float(np.median(late_s)),
        "late_p95_s": float(np.percentile(late_s, 95)),
        "figures_per_s": len(late_s) / took_s,
        "stream_bytes_per_s": num_bytes / took_s,
        "memory_bytes": process.memory_info().rss,
    }


def rows_of(url: str, nodes: Nodes) -> tuple[int, int]:
    """(samples that a freshly started page has of a node, samples that the node had written before)."""
    with Listener(url) as browser:
        entry = next(event for event in browser.events() if event.name == "runs").data["runs"][0]
    key, node = entry["key"], entry["node"]
    written = sum(name == node for name, _ in list(nodes.written_s))
    with Listener(url, query=f"?run={key.replace(' ', '%20')}") as browser:
        history = next(event for event in browser.events() if event.name == "history")
    return len(history.data["at_s"]), written


def measure(arm: str, *, num: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        nodes = Nodes(Path(folder), num)
        nodes.start()
        time.sleep(2.0)
        sources = [folder]
        if arm == "pages":
            pages = [PageServer(folders=[each], root=Path(folder) / "none") for each in nodes.folders]
            sources = [stack.enter_context(page).url for page in pages]
        with page_of(sources) as (process, url):
            found = look(url, nodes, seconds, process)
        with page_of(sources) as (_, url):
            shown, written = rows_of(url, nodes)
        nodes.is_over.set()
        nodes.join()
    return {**found, "samples_written": written, "samples_lost_by_restart": max(0, written - shown)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: dict[str, Any] = {"nodes": options.nodes, "seconds": options.seconds}
    for arm in ("folder", "pages"):
        rows[arm] = measure(arm, num=options.nodes, seconds=options.seconds)
        print(f"{arm}: {rows[arm]}")
    report("watching", rows, folder=Path(__file__).parent, save=options.save)


if __name__ == "__main__":
    main()
