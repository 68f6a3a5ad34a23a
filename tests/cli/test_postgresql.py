"""Two processes of a search share a study in a real PostgreSQL server that is restarted under them."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import Postgres
from tests.support.steering import tiny_search, write_tiny
from tests.support.warm_python import warm

# A judge at which a worker waits, at its third text, until the server is gone.
GATE = """
import os, pathlib, time
folder, seen = pathlib.Path(__file__).parent, 0

def judge(question, text):
    global seen
    seen += 1
    if seen == 3:
        (folder / f"waits-{os.getpid()}").touch()
    while seen == 3 and not (folder / "open").exists():
        time.sleep(0.02)
    return float(len(text))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as made:
        yield made


def test_a_restarted_server_costs_no_row_and_no_worker(server: Postgres, tmp_path: Path) -> None:
    tiny, out = write_tiny(tmp_path / "tiny"), tmp_path / "run"
    (tmp_path / "gate.py").write_text(GATE)
    config = tmp_path / "search.yaml"
    given = tiny_search(
        tiny, out, judge="gate:judge", max_new_tokens=3, storage=server.url, study="shared", trials=8
    )
    config.write_text(json.dumps(given))

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [str(warm().bin / "flatout"), "steer", "search", *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path, env=warm().environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for(number: int, process: subprocess.Popen[str]) -> None:
        for _ in range(3000):
            if process.poll() is not None or len([*tmp_path.glob("waits-*")]) == number:
                break
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[1]

    first = start(str(config), "--json")
    wait_for(1, first)
    second = start(str(out), "--join", "--worker", "guest")
    wait_for(2, second)
    before = {path.stem: path.read_text() for path in (out / "rows").glob("*.jsonl")}
    assert sorted(before) == ["0", "guest"] and all(len(rows.splitlines()) == 2 for rows in before.values())
    server.stop("immediate")  # as if its machine had lost power
    (tmp_path / "open").touch()
    # Both come to ask a server that is away; whether they do so before it is back, the end is the same.
    server.start()
    printed, told = first.communicate()
    _, guest_told = second.communicate()
    assert first.returncode == 0, told
    assert second.returncode == 0, guest_told
    after = {path.stem: path.read_text() for path in (out / "rows").glob("*.jsonl")}
    assert all(after[name].startswith(rows) for name, rows in before.items()), "a finished row was lost"
    counted = Counter(
        (row["trial"], row["question"])
        for rows in after.values()
        for row in map(json.loads, rows.splitlines())
    )
    assert max(counted.values()) == 1, "a finished row was run again"
    trials = json.loads(printed)["trials"]
    assert len(trials) >= 8 and {trial["state"] for trial in trials} <= {"complete", "pruned"}
