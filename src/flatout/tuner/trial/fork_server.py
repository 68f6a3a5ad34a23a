"""A process that has imported torch, and forks each trial: what costs seconds at every start is paid once.

torch and what the first optimizer imports of it take 2 to 7 seconds, most of a short trial.  The server
imports them, runs nothing, and never touches CUDA, which a fork could not use.  A fork starts as an
interpreter does: in a session of its own, with its own output and working folder.

What a script sets before it imports torch would come too late here, so the first trial of a job starts
plainly and tells whether its environment was still the one it began with when torch had been imported.

The server of `memory.process` calls a function and returns its answer; here a fork becomes the user's script,
which has an exit code and a session that can be ended as a whole.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from typing import IO, NoReturn

from flatout.ground.script.main import start_command
from flatout.measure.run.lineage import end_with

MODULE = "flatout.tuner.trial.fork_server"
IMPORTED = ("torch", "torch._dynamo")  # the first optimizer imports the second
NVML_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"  # looks for a GPU without starting CUDA
SIZE_BYTES = 8


class ForkServer:
    """Starts processes that call `main(at_start)` of a module; they end with this process."""

    def __init__(self, module: str) -> None:
        own, its = socket.socketpair()
        with its:
            self._server = subprocess.Popen(
                start_command(MODULE, json.dumps([module, its.fileno(), os.getpid()])),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[its.fileno()],
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        self._socket, self._one_asks = own, threading.Lock()
        self._pid = b""

    def wait_ready(self) -> int:
        """Wait until everything is imported; return the pid, which is the parent of what it starts."""
        with self._one_asks:
            self._pid = self._pid or self._socket.recv(SIZE_BYTES)
        if not self._pid:
            raise BrokenPipeError("the server has ended")
        return int.from_bytes(self._pid, "big")

    def start(self, argument: str, output: IO[bytes]) -> Forked:
        """Start a process with an argument; raise OSError if the server is gone."""
        own, its = socket.socketpair()
        request = json.dumps([argument, os.getcwd()]).encode()
        try:
            with its, self._one_asks:
                size = len(request).to_bytes(SIZE_BYTES, "big")
                socket.send_fds(self._socket, [size], [its.fileno(), output.fileno()])
                self._socket.sendall(request)
        except OSError:
            own.close()
            raise
        return Forked(own)

    def close(self) -> None:
        """End the server, and with it what it started."""
        self._server.kill()
        self._server.wait()
        self._socket.close()


class Forked:
    """A process that a server started."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers.makefile("r")
        self._socket = answers
        self.returncode: int | None = None
        try:
            self.pid = int(self._answers.readline())
        except (ValueError, OSError):
            self._close()
            raise BrokenPipeError("the server has ended") from None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["trial"], timeout or 0.0)
            # Without an answer the server was killed, and its processes with it.
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._close()
        return self.returncode

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()


def can_fork() -> bool:
    """Return whether this system can tell when a process that it forked has ended."""
    return hasattr(os, "fork") and hasattr(os, "pidfd_open")


def main(at_start: Collection[str]) -> None:
    """Fork a process for each request until the other end is closed."""
    module, descriptor, parent = json.loads(sys.argv[1])
    number = int(descriptor)
    end_with(parent)
    run = _prepare(module)
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process, and who waits for it
    with socket.socket(fileno=number) as requests:
        requests.sendall(os.getpid().to_bytes(SIZE_BYTES, "big"))
        while True:
            ready = select.select([number, *running], [], [])[0]
            for ended in set(ready) - {number}:
                pid, connection = running.pop(ended)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ended)
                with connection, contextlib.suppress(OSError):  # nobody may wait any more
                    connection.sendall(f"{code}\n".encode())
            if number not in ready:
                continue
            size, files, _, _ = socket.recv_fds(requests, SIZE_BYTES, 2)
            if not size:
                return
            argument, folder = json.loads(_read(requests, int.from_bytes(size, "big")))
            connection, output = socket.socket(fileno=files[0]), files[1]
            pid = os.fork()
            if pid == 0:
                for each in (requests, *(other for _, other in running.values())):
                    each.close()
                _become(connection, output, folder)
                sys.argv[1] = argument
                _end(run, at_start)
            os.close(output)
            running[os.pidfd_open(pid)] = pid, connection


def _prepare(module: str) -> Callable[[Collection[str]], None]:
    """Import what every trial imports, and return the module's `main`."""
    asks_nvml = os.environ.get(NVML_ONLY)
    os.environ[NVML_ONLY] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    if asks_nvml is None:
        del os.environ[NVML_ONLY]
    else:
        os.environ[NVML_ONLY] = asks_nvml
    found: Callable[[Collection[str]], None] = importlib.import_module(module).main
    return found


def _read(requests: socket.socket, size: int) -> str:
    data = b""
    while len(data) < size:
        data += requests.recv(size - len(data))
    return data.decode()


def _become(connection: socket.socket, output: int, folder: str) -> None:
    """Begin as a process that was started: with a session, a folder and output of its own."""
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    connection.sendall(f"{os.getpid()}\n".encode())  # from here on it can be ended as a group
    connection.close()


def _end(run: Callable[[Collection[str]], None], at_start: Collection[str]) -> NoReturn:
    """Call `main`, and end as the interpreter does."""
    code = 0
    try:
        run(at_start)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter would print it
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)
