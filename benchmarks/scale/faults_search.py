"""What a search and a tuning lose when something is killed: rows and trials that had ended, and were gone.

    python benchmarks/scale/faults_search.py [--only PART] [--save]

Real parts on this machine: worker processes, a Ray cluster of two nodes, a PostgreSQL server.  The search
scores texts of a tiny model by a judge that waits 30 ms, so that it lasts; each fault comes when two workers
have answered some rows.  `rows_lost` are answered rows that are gone at the end, `rows_twice` those that were
answered again.  The stalls happen in a network namespace of their own, whose loopback is taken down for 30 s.

Of a tuning, `rows` are the trials in its journal; a killed command goes on with `--resume`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from interleaved import report  # noqa: E402

from tests.support.postgres import Postgres  # noqa: E402
from tests.support.steering import tiny_search, write_tiny  # noqa: E402
from tests.support.two_nodes import ENVIRONMENT, TwoNodes  # noqa: E402

STALL_S, DOWN_S, LIMIT_S = 30.0, 5.0, 900.0
JUDGE = """
import os, pathlib, time
go = pathlib.Path(__file__).parent / "go"

def judge(question, text):
    while "FLATOUT_STEER_SUPERVISED" not in os.environ and not go.exists():
        time.sleep(0.02)  # the first worker waits for the others to have something to lose
    time.sleep(0.03)
    return float(len(text))
"""
SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.002)  # a disk
        return torch.randn(8, generator=torch.Generator().manual_seed(index))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Slow(), batch_size=4, shuffle=True):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


class Command:
    """A command of flatout in a folder, which may be started again."""

    def __init__(
        self, folder: Path, *arguments: str | Path, environment: dict[str, str] | None = None
    ) -> None:
        self.folder, self._arguments = folder, [*map(str, arguments)]
        self._environment = environment or {**os.environ, **ENVIRONMENT}
        self.log = folder / "stderr"

    def start(self, *more: str) -> None:
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flatout", *self._arguments[:1], *more, *self._arguments[1:]],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_until(self, happens: Callable[[], Any]) -> None:
        began_s = time.monotonic()
        while not happens():
            if self.process.poll() is not None or time.monotonic() - began_s > LIMIT_S:
                raise RuntimeError(f"it ended too early: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Search(Command):
    """A search of so many trials by two or three workers."""

    def __init__(
        self, folder: Path, *, trials: int = 40, environment: dict[str, str] | None = None, **changes: Any
    ) -> None:
        self.out = folder / "run"
        (folder / "slow.py").write_text(JUDGE)
        given = {"judge": "slow:judge", "max_new_tokens": 3, "trials": trials, "workers": 2, **changes}
        (folder / "search.yaml").write_text(
            json.dumps(tiny_search(write_tiny(folder / "tiny"), self.out, **given))
        )
        super().__init__(folder, "steer", "search", "search.yaml", environment=environment)

    def rows(self) -> Counter[tuple[int | None, str]]:
        found: Counter[tuple[int | None, str]] = Counter()
        for path in self.out.glob("rows/*.jsonl"):
            *lines, _ = path.read_bytes().split(b"\n")
            found.update((row["trial"], row["question"]) for row in map(json.loads, lines))
        return found

    def num_busy(self) -> int:
        """Count the workers that have answered some rows."""
        return sum(path.read_bytes().count(b"\n") >= 5 for path in self.out.glob("rows/*.jsonl"))


def measure_search(
    search: Search, fault: Callable[[Search], object], *, restart: bool = False
) -> dict[str, Any]:
    search.start()
    search.wait_until(lambda: search.num_busy() >= 1)
    (search.folder / "go").touch()
    search.wait_until(lambda: search.num_busy() >= 2)
    before = search.rows()
    fault(search)
    if restart:
        search.start()
    code = search.process.wait(timeout=LIMIT_S)
    after = search.rows()
    record = json.loads((search.out / "result.json").read_text()) if code == 0 else {"trials": []}
    return {
        "exit_code": code,
        "rows_before": sum(before.values()),
        "rows_lost": sum((before - after).values()),
        "rows_twice": sum(number - 1 for number in after.values()),
        "rows_at_end": len(after),
        "trials_ended": sum(trial["state"] in ("complete", "pruned") for trial in record["trials"]),
        "trials_failed": sum(trial["state"] == "failed" for trial in record["trials"]),
    }


def kill_local_worker(search: Search) -> None:
    words = next(line for line in search.log.read_text().splitlines() if "worker 1 is process" in line)
    os.kill(int(words.split()[-1]), signal.SIGKILL)


def running_tasks(nodes: TwoNodes) -> list[psutil.Process]:
    """The processes of Ray that run a task."""
    found = []
    for process in psutil.Process(nodes.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::_run_there"]:
                found.append(process)
    return found


def kill_task(nodes: TwoNodes) -> None:
    """Kill a process of Ray that runs a task."""
    running_tasks(nodes)[0].kill()


def stall(_: Command) -> None:
    for state, pause_s in (("down", STALL_S), ("up", 0.0)):
        subprocess.run(["ip", "link", "set", "lo", state], check=True)
        time.sleep(pause_s)


def of_search(folder: Path, *, inside: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every fault of a search, by what is killed."""

    def made(name: str, **changes: Any) -> Search:
        (folder / name).mkdir()
        return Search(folder / name, **changes)

    def with_ray(name: str, fault: Callable[[TwoNodes, Search], object], **options: Any) -> dict[str, Any]:
        with TwoNodes() as nodes:
            search = made(name, ray=nodes.address, environment=nodes.environment)
            return measure_search(search, lambda running: fault(nodes, running), **options)

    def with_server(name: str, fault: Callable[[Postgres, Search], object]) -> dict[str, Any]:
        with Postgres() as server:
            search = made(name, storage=server.url, study="faults")
            return measure_search(search, lambda running: fault(server, running))

    def restart(server: Postgres, _: Search) -> None:
        server.stop("immediate")
        time.sleep(DOWN_S)
        server.start()

    if inside:
        return {
            "search, network stalls 30 s, PostgreSQL": lambda: with_server("6", lambda _, one: stall(one)),
            "search, network stalls 30 s, Ray": lambda: with_ray("7", lambda _, one: stall(one)),
        }
    return {
        "search, kill -9 of a worker": lambda: measure_search(made("0"), kill_local_worker),
        "search, kill -9 of a worker's task, Ray": lambda: with_ray("1", lambda nodes, _: kill_task(nodes)),
        "search, kill -9 of a node, Ray": lambda: with_ray("2", lambda nodes, _: nodes.remove()),
        "search, kill -9 of the command": lambda: measure_search(made("3"), Search.kill, restart=True),
        "search, kill -9 of the command, Ray": lambda: with_ray("4", lambda _, one: one.kill(), restart=True),
        "search, database crashes, 5 s down": lambda: with_server("5", restart),
    }


def of_tuning(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every fault of a tuning."""

    def measured(
        name: str, fault: Callable[[TwoNodes, Command], object], *, resume: bool = False
    ) -> dict[str, Any]:
        own = folder / name
        own.mkdir()
        (own / "train.py").write_text(SCRIPT)
        diagnose(own)
        with TwoNodes() as nodes:
            given = ("--evidence", "evidence.json", "--only", "loader-workers=2", "--ray", nodes.address)
            tune = Command(own, "tune", *given, "train.py", environment=nodes.environment)
            journal = own / ".flatout" / "train-tuning.jsonl"
            tune.start()
            tune.wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3)
            _, *before = journal.read_text().splitlines()
            fault(nodes, tune)
            if resume:
                tune.start("--resume")
                words = f"{len(before)} trials are already finished"
                tune.wait_until(lambda: "trials are already finished" in tune.log.read_text())
                lost = 0 if words in tune.log.read_text() else None
            else:
                tune.wait_until(lambda: journal.read_bytes().count(b"\n") > len(before) + 1)
                lost = len(set(before) - set(journal.read_text().splitlines()))
            code = tune.process.wait(timeout=LIMIT_S)
            kept = (own / "flatout.toml").exists()
        return {"exit_code": code, "rows_before": len(before), "rows_lost": lost, "kept": kept}

    return {
        "tuning, kill -9 of a trial's task, Ray": lambda: measured("a", lambda nodes, _: kill_task(nodes)),
        "tuning, kill -9 of a node, Ray": lambda: measured("b", lambda nodes, _: nodes.remove()),
        "tuning, kill -9 of the command, Ray": lambda: measured("c", lambda _, one: one.kill(), resume=True),
    }


def diagnose(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "flatout",
        "diagnose",
        "--seconds",
        "8",
        "--save",
        "evidence.json",
        "train.py",
    ]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)


def inside_namespace(only: str) -> dict[str, Any]:
    """Run the stalls in a network namespace, whose only link is a loopback."""
    own = [sys.executable, __file__, "--inside", "--only", only]
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *own]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def saved_rows(subject: str) -> dict[str, Any]:
    """The rows that were measured last: those that are not measured again stay as they are."""
    saved = sorted((Path(__file__).parent / "results").glob(f"{subject}_*.json"))
    known = json.loads(saved[-1].read_text()) if saved else {}
    return {name: row for name, row in known.items() if isinstance(row, dict)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has this part")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        faults = of_search(Path(folder), inside=options.inside)
        if not options.inside:
            faults |= of_tuning(Path(folder))
        for name, run in faults.items():
            if options.only in name:
                began_s = time.monotonic()
                try:
                    rows[name] = {**run(), "seconds": time.monotonic() - began_s}
                except (RuntimeError, subprocess.SubprocessError) as error:
                    rows[name] = {"failed": str(error)}
                print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    if options.inside:
        print(json.dumps(rows))
        return
    rows |= inside_namespace(options.only)
    if options.save and options.only:
        rows = saved_rows("faults-search") | rows
    for name, row in rows.items():
        shown = row.get("failed") or f"{row['rows_before']:>4} rows before, {row['rows_lost']} lost"
        print(f"{name:<45} {shown}")
    report("faults-search", rows, folder=Path(__file__).parent, save=options.save)


if __name__ == "__main__":
    main()
