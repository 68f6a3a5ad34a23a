"""Python that has imported torch already: a command starts in a tenth of a second instead of three.

A server imports what nearly every command imports, and runs nothing.  The programs in `warm().bin` hand it
their arguments, folder, environment and open files; it forks, and the fork is the command: a process
of its own, with its own exit code, that gets the signals of the one that handed it over and ends with it.
A test of starting itself (imports, threads, parents, time) starts a plain interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("torch", "torch._dynamo", "transformers", "safetensors.torch", "flatout.cli.app")
MOST_FILES = 64  # that a command inherits
# `python -c DRIVER warm().bin/python ...` is flatout whose own processes are warm, too.
DRIVER = "import sys; sys.executable = sys.argv.pop(1); from flatout.cli.app import main; main()"
CLIENT = """\
#!{python} -ISE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
def is_inherited(file):
    try:
        return os.get_inheritable(file)
    except OSError:
        return False
files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_inherited(file)]
request = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ), os.getppid(), files]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
code = int(server.makefile().readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def warm() -> WarmPython:
    """The server of this process, started when it is first asked for; it ends with this process."""
    return WarmPython()


class WarmPython:
    """A server; `bin` holds the programs, and `run` starts one of them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        address = str(folder / "socket")
        for name in ("python", "flatout", "torchrun"):
            client = self.bin / name
            client.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
            client.chmod(0o755)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_python", address],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        atexit.register(self._close)

    def _close(self) -> None:
        self._server.communicate()  # it ends where its input does
        self._folder.cleanup()

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of a shell whose programs are warm, and torchrun's ranks with them."""
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHON_EXEC": str(self.bin / "python"), **changes}

    def run(
        self, *command: str | Path, cwd: Path | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run `python`, `flatout` or `torchrun` with arguments, and capture what it prints."""
        program, *arguments = map(str, command)
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
        )

    def run_agents(self, *command: str | Path, num_nodes: int = 2) -> list[subprocess.CompletedProcess[str]]:
        """Run a module under one torchrun agent per node, all on this machine, at the same time."""
        from torch.distributed import TCPStore

        # The store of the rendezvous is here: nobody else can take its port.
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf"]
        nodes = ["--nnodes", str(num_nodes), "--nproc-per-node", "1", *place, "is_host=0"]
        with ThreadPoolExecutor(num_nodes) as pool:
            return list(pool.map(lambda _: self.run("torchrun", *nodes, *command), range(num_nodes)))


def serve(address: str) -> None:
    """Fork a process per command until the input ends."""
    for name in IMPORTED:
        __import__(name)
    gc.freeze()  # a fork that collects garbage does not copy all that was imported
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        _reap()
        if os.fork() == 0:
            listener.close()
            _answer(connection)
        connection.close()
    _reap()
    os._exit(0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket) -> NoReturn:
    """Fork the command that was asked for, and answer with its exit code."""
    prefix, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    size, request = int.from_bytes(prefix, "big"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    if pid := os.fork():
        for each in files:
            os.close(each)
        ended = os.pidfd_open(pid)
        while ended not in select.select([ended, connection], [], [])[0]:
            os.kill(pid, (connection.recv(1) or bytes([signal.SIGKILL]))[0])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{code}\n".encode())
        os._exit(0)
    connection.close()
    program, arguments, folder, environment, parent, numbers = json.loads(request)
    apart = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 1 + max(numbers)) for each in files]
    for each in files:
        os.close(each)
    for number, each in zip(numbers, apart, strict=True):
        os.dup2(each, number)
        os.close(each)
    _set_parent(parent)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(number, "w" if number else "r", buffering=1, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _end(_code_of(_become, program, arguments))


def _set_parent(parent: int) -> None:
    """Let who started the program be the parent of this process, but not of those that it forks."""
    own, ask = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == own else ask()


def _code_of(work: Callable[..., None], *arguments: Any) -> int:
    """Call `work` as the interpreter runs a program: what it raises is printed and becomes the exit code."""
    try:
        work(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but leave the memory to the system: taking torch down costs a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(program: str, arguments: list[str]) -> None:
    """Run the command line as the interpreter would."""
    del sys.path[0], sys.modules["tests"], sys.modules["tests.support"]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0:0] = [each for each in path if each and each not in sys.path]
    while program == "python" and arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    if arguments[:1] == ["-W"]:
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if program == "flatout":
        from flatout.cli.app import main as run_flatout

        sys.argv = [program, *arguments]
        run_flatout()
    elif program == "torchrun":
        from torch.distributed.run import main as run_ranks

        run_ranks(arguments)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
