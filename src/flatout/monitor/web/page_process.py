"""The page of a script that runs under watch, in a process beside it: `flatout watch --run --web`.

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
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.errors import FlatoutError
from flatout.monitor.web.server import PageServer
from flatout.runs import is_alive, list_runs, process_started_s

MODULE = "flatout.monitor.web.page_process"
LOOK_EVERY_S = 0.1
LAST_LOOK_S = 3.0  # for browsers to see how it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """Whose page it is, and where it is served."""

    pid: int
    process_started_s: float | None
    root: str | None  # the folder of runs; None: the usual one
    host: str
    port: int

    @property
    def is_script_running(self) -> bool:
        return is_alive(self.pid, self.process_started_s)


def start_page(*, root: Path | None, host: str, port: int) -> None:
    """Start a page for this process, whatever it becomes; print its address on stderr."""
    options = PageOptions(
        pid=os.getpid(),
        process_started_s=process_started_s(os.getpid()),
        root=None if root is None else str(root.absolute()),
        host=host,
        port=port,
    )
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
        os.execv(sys.executable, [sys.executable, "-m", MODULE, json.dumps(asdict(options))])
    finally:
        os._exit(2)


def main() -> None:
    options = PageOptions(**json.loads(sys.argv[1]))
    root = None if options.root is None else Path(options.root)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = None
    while folder is None and options.is_script_running:  # a script that ends without a run has no page
        time.sleep(LOOK_EVERY_S)
        runs = list_runs(root, kind="watch")
        folder = next(
            (
                path
                for path, run in runs
                if run.pid == options.pid and is_alive(run.pid, run.process_started_s)
            ),
            None,
        )
    if folder is None:
        return
    try:
        with PageServer(folders=[folder], root=root, host=options.host, port=options.port) as page:
            print(
                f"flatout: the page is at {page.url} (it ends with the script)", file=sys.stderr, flush=True
            )
            _leave(sys.stderr.fileno())  # whoever reads it to its end waits for the script, not for the page
            while options.is_script_running:
                time.sleep(LOOK_EVERY_S)
            time.sleep(LAST_LOOK_S)
    except FlatoutError as error:
        print(f"flatout: no page: {error}", file=sys.stderr)


def _leave(stream: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream)
    os.close(nothing)


if __name__ == "__main__":
    main()
