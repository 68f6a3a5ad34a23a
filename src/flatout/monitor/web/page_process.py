"""The page of a watched script, in a separate process: `flatout watch --run --web`.

A server inside the script's interpreter would take turns with it.  This one reads the log that the script's
own sampler keeps, so the machine is not asked twice.  It is nobody's child (a script that waits for all its
children would wait for it), ignores Ctrl-C, which is the script's, and ends soon after the script.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flatout.ground.errors import FlatoutError
from flatout.ground.runs import is_alive, list_runs, process_key, process_started_s
from flatout.monitor.web.server import PageServer

MODULE = "flatout.monitor.web.page_process"
LOOK_EVERY_S = 0.1
LAST_LOOK_S = 3.0  # for browsers to see how it ended


def start_page(*, root: Path | None, host: str, port: int, token: bool = False) -> None:
    """Start a page for this process, whatever it becomes; print its address on stderr."""
    options = {
        "pid": os.getpid(),
        "started_s": process_started_s(os.getpid()),
        "key": process_key(os.getpid()),
        "root": None if root is None else str(root.absolute()),
        "host": host,
        "port": port,
        "token": token,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    _leave(sys.stdout.fileno())
    try:
        os.execv(sys.executable, [sys.executable, "-m", MODULE, json.dumps(options)])
    finally:
        os._exit(2)


def serve_beside(
    *, pid: int, started_s: float | None, root: str | None, key: str | None = None, **address: Any
) -> None:
    """Serve the run of a process until soon after that ends; nothing if it ends without a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runs = None if root is None else Path(root)
    folder = None
    while folder is None and is_alive(pid, started_s, key):
        time.sleep(LOOK_EVERY_S)
        found = list_runs(runs, kind="watch")
        of_pid = ((path, run) for path, run in found if run.pid == pid)
        alive = (path for path, run in of_pid if is_alive(pid, run.process_started_s, run.process_key))
        folder = next(alive, None)
    if folder is None:
        return
    try:
        with PageServer(folders=[folder], root=runs, **address) as page:
            print(
                f"flatout: the page is at {page.url} (it ends with the script)", file=sys.stderr, flush=True
            )
            _leave(sys.stderr.fileno())  # who reads stderr to its end must not wait for the page
            while is_alive(pid, started_s, key):
                time.sleep(LOOK_EVERY_S)
            time.sleep(LAST_LOOK_S)
    except FlatoutError as error:
        print(f"flatout: no page: {error}", file=sys.stderr)


def _leave(stream: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream)
    os.close(nothing)


if __name__ == "__main__":
    serve_beside(**json.loads(sys.argv[1]))
