"""What strangers do to the page and the list: 515 connections that say nothing, 250 streams, hostile folders.

    python benchmarks/monitor/connections.py [--idle 515] [--streams 250] [--save]

The page is a process of its own, so that its memory can be read and its files are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from flatout.ground.runs import create_run, end_run, this_run

HERE = Path(__file__).parent
PATIENCE_S = 60.0


def ask(address: str, path: str, *, seconds: float = PATIENCE_S) -> socket.socket:
    """Send a request; the answer is not read."""
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=seconds)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return connection


def status(connection: socket.socket) -> int:
    head = b""
    while len(head) < 12 and (more := connection.recv(12 - len(head))):
        head += more
    return int(head[9:12] or b"0")


def page_status(address: str) -> int:
    with contextlib.closing(ask(address, "/")) as connection:
        return status(connection)


def idle_part(address: str, page: psutil.Process, *, num: int) -> dict[str, Any]:
    """When the page answers beside connections that never ask, and when the last of them is closed."""
    parts = urlsplit(address)
    before_bytes = page.memory_info().rss
    start = time.monotonic()
    idle = [socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) for _ in range(num)]
    while (answer := page_status(address)) != 200 and time.monotonic() - start < PATIENCE_S:
        time.sleep(0.05)
    answered_s = time.monotonic() - start
    num_closed = sum(_is_closed(connection) for connection in idle)
    closed_s = time.monotonic() - start
    for connection in idle:
        connection.close()
    return {
        "connections": num,
        "page_status": answer,
        "page_answers_after_s": answered_s,
        "all_closed_after_s": closed_s,
        "closed": num_closed,
        "grown_bytes": page.memory_info().rss - before_bytes,
    }


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def streams_part(address: str, page: psutil.Process, *, num: int) -> dict[str, Any]:
    """How many of the streams that are asked for at once are given."""
    before_bytes = page.memory_info().rss
    start = time.monotonic()
    asked = [ask(address, "/events") for _ in range(num)]
    answers = [status(connection) for connection in asked]
    answered_s = time.monotonic() - start
    page_answer = page_status(address)
    followed = [connection for connection, answer in zip(asked, answers, strict=True) if answer == 200]
    num_hearing = sum(_hears_a_sample(connection) for connection in followed)
    grown_bytes = page.memory_info().rss - before_bytes
    for connection in asked:
        connection.close()
    return {
        "asked": num,
        "given": len(followed),
        "refused": answers.count(503),
        "answered_within_s": answered_s,
        "hear_samples": num_hearing,
        "page_status": page_answer,
        "grown_bytes": grown_bytes,
    }


def _hears_a_sample(connection: socket.socket) -> bool:
    heard = b""
    while b"event: sample" not in heard:
        more = connection.recv(65536)
        if not more:
            return False
        heard = heard[-20:] + more
    return True


def hostile_part() -> dict[str, Any]:
    """The time to list a folder of runs with some that are damaged on purpose, and without those."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(20):
            good = create_run(this_run(f"good-{number}", time_s=1.7e9 + number), root)
            end_run(good, time_s=1.7e9 + 60, end="finished", exit_code=0)
            (good / "raw-000001.jsonl").write_text('{"time_s":1700000001.0}\n' * 100)
        clean = _list_s(root)
        text = (good / "run.json").read_text()
        changes = {
            "negative": text.replace(f'"pid": {os.getpid()}', '"pid": -5'),
            "nan": text.replace('"started_s": ', '"started_s": NaN, "x": '),
            "deep": "[" * 1_000_000,
            "huge": text + " " * 2**26,
        }
        for name, damaged in changes.items():
            (root / name).mkdir()
            (root / name / "run.json").write_text(damaged)
        (root / "pipe").mkdir()
        os.mkfifo(root / "pipe" / "run.json")
        (good / "raw-000002.jsonl.gz").write_bytes(gzip.compress(bytes(2**30), 1))
        os.mkfifo(good / "raw-000003.jsonl")
        hostile = _list_s(root)
        return {"good": 20, "clean_s": clean[0], "hostile_s": hostile[0], "listed": hostile[1]}


def _list_s(root: Path) -> tuple[float, int]:
    start = time.monotonic()
    command = [sys.executable, "-m", "flatout", "watch", "--list", "--json", "--log", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return time.monotonic() - start, len(json.loads(done.stdout)["runs"])


def measure(*, num_idle: int, num_streams: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flatout", "watch", "--web", "--log", folder]
        page = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert page.stderr is not None
        try:
            found = None
            while found is None:
                found = re.search(r"http://\S+", page.stderr.readline())
            process = psutil.Process(page.pid)
            page_status(found[0])
            return {
                "idle": idle_part(found[0], process, num=num_idle),
                "streams": streams_part(found[0], process, num=num_streams),
                "hostile": hostile_part(),
            }
        finally:
            page.terminate()
            page.wait()
            page.stderr.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=515)
    parser.add_argument("--streams", type=int, default=250)
    parser.add_argument("--save", action="store_true", help="write results/connections_HARDWARE_DATE.json")
    options = parser.parse_args()
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(most, options.idle + 200), hard), hard))
    cores = f"{os.cpu_count()} cores"
    result = {"benchmark": "connections", "hardware": f"{platform.machine()}, {cores}"}
    result |= measure(num_idle=options.idle, num_streams=options.streams)
    idle, streams = result["idle"], result["streams"]
    print(
        f"{idle['connections']} idle connections: the page answers {idle['page_status']} after "
        f"{idle['page_answers_after_s']:.2f} s; {idle['closed']} closed after "
        f"{idle['all_closed_after_s']:.1f} s"
    )
    print(
        f"{streams['asked']} streams: {streams['given']} given, {streams['refused']} refused within "
        f"{streams['answered_within_s']:.2f} s; {streams['hear_samples']} hear samples; "
        f"the page answers {streams['page_status']}, and grew by {streams['grown_bytes'] / 1e6:.1f} MB"
    )
    hostile = result["hostile"]
    print(
        f"{hostile['good']} runs among hostile ones: {hostile['listed']} listed in "
        f"{hostile['hostile_s']:.2f} s; "
        f"without the hostile ones in {hostile['clean_s']:.2f} s"
    )
    print(json.dumps(result))
    if options.save:
        hardware = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]).lower())
        path = HERE / "results" / f"connections_{hardware}_{date.today().isoformat()}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
