"""Many browsers on one page: real connections that follow its events, and some that never read.

python benchmarks/monitor/browsers.py http://127.0.0.1:8000/ --num 50 --silent 1 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import statistics
import time
from typing import Any
from urllib.parse import urlsplit

SMALL_BUFFER_BYTES = 4096


def _request(address: str) -> tuple[str, int, bytes]:
    parts = urlsplit(address)
    assert parts.hostname is not None and parts.port is not None
    head = f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: text/event-stream\r\n\r\n"
    return parts.hostname, parts.port, head.encode()


async def follow(address: str, came_s: list[float]) -> None:
    """Read events for as long as they come; note when each sample came."""
    host, port, head = _request(address)
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    writer.write(head)
    try:
        while line := await reader.readline():
            if line.startswith(b"event: sample"):
                came_s.append(time.monotonic())
    finally:
        writer.close()


def connect_silently(address: str) -> socket.socket:
    """Ask for the events and never read one."""
    host, port, head = _request(address)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    silent.connect((host, port))
    silent.sendall(head)
    return silent


async def browse(address: str, *, num: int, silent: int, seconds: float) -> dict[str, Any]:
    deaf = [connect_silently(address) for _ in range(silent)]
    came = [[] for _ in range(num)]  # type: list[list[float]]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for each in came:
                group.create_task(follow(address, each))
    for each_socket in deaf:
        each_socket.close()
    gaps = [after - before for each in came for before, after in itertools.pairwise(each)]
    return {
        "browsers": num,
        "silent": silent,
        "seconds": seconds,
        "fewest_samples": min((len(each) for each in came), default=0),
        "median_gap_s": statistics.median(gaps) if gaps else None,
        "longest_gap_s": max(gaps, default=None),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address")
    parser.add_argument("--num", type=int, default=50)
    parser.add_argument("--silent", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    seen = asyncio.run(
        browse(options.address, num=options.num, silent=options.silent, seconds=options.seconds)
    )
    print(json.dumps(seen))
