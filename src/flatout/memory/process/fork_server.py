"""A server process that starts fresh and forks a child for each piece of work it receives.

A child that is to use CUDA or run a backward must be forked from a process that has done neither.  Where this
process has, a server is started beside it: it imports what a trace imports, and what this process has of
packages that take seconds, and then forks in milliseconds.  It ends with this process, or after a while
without work, and is started again.

It is a plain `python -c`, not multiprocessing's server, which would run the user's script a second time:
without an `if __name__ == "__main__"` that is a second training.  What the script defines comes in the parcel
(`parcel`); paths, arguments, environment and folder are those of the caller at that moment.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput, ChildDied
from flatout.memory.process.isolated_process import answer_of

if TYPE_CHECKING:
    import torch

IDLE_S = 120.0  # the server holds a few hundred MB, which is not the plan's to keep
SLOW_PACKAGES = {"accelerate", "diffusers", "lightning", "peft", "timm", "torchvision", "transformers"}
CODE = (  # a door, how many modules, these, and the path
    "import sys; door, count = map(int, sys.argv[1:3]); sys.path[:] = sys.argv[3 + count :]; "
    "from flatout.memory.process.fork_server import serve; serve(door, modules=sys.argv[3 : 3 + count])"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a forked child would inherit from its parent."""

    path: list[str]
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    default_dtype: torch.dtype

    @classmethod
    def here(cls) -> Surroundings:
        import torch

        return cls(
            path=list(sys.path),
            arguments=list(sys.argv),
            environment=dict(os.environ),
            folder=os.getcwd(),
            default_dtype=torch.get_default_dtype(),
        )

    def take(self) -> None:
        import torch

        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_default_dtype(self.default_dtype)


@dataclass(frozen=True, slots=True)
class _Server:
    process: subprocess.Popen[bytes]
    door: socket.socket  # each request is one end of a socket, sent through it

    def end(self) -> None:
        self.door.close()
        self.process.terminate()
        self.process.wait()


_lock = threading.Lock()
_servers: dict[int, _Server] = {}  # by the process that started it: a fork of that one starts its own
_imports_packages = True  # until a server turns out to be of no use with them


def answer_from_server(parcel: bytes) -> tuple[str, Any]:
    """Run the function in a parcel in a child of the server; return what `answer_of` gives."""
    here, pid = _connect()
    try:
        here.send(Surroundings.here())
        here.send_bytes(parcel)
        answer: tuple[str, Any] = here.recv()
    except (EOFError, OSError):
        raise ChildDied(
            "the process that was started for the model exited without an answer",
            hint="most often the system has run out of memory",
        ) from None
    except BaseException:  # an interrupt: nobody waits for the answer any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        here.close()
    return answer


def _connect() -> tuple[Connection, int]:
    """Return a connection to a child of the server, and the child's number.

    If a server fails to import the modules of this process, or if their imports ask CUDA anything, it is
    replaced by one without them.
    """
    for _ in range(2):
        here, there = multiprocessing.Pipe()
        server = _find_server()
        try:
            socket.send_fds(server.door, [b"."], [there.fileno()])
            there.close()
            return here, int(here.recv())
        except (EOFError, OSError):
            here.close()
            there.close()
            _end(server, is_of_no_use=True)
    raise ChildDied(
        "the process for the model does not start",
        hint=f"read its output above; it runs {sys.executable} with this process's sys.path",
    )


def _find_server() -> _Server:
    with _lock:
        server = _servers.get(os.getpid())
        if server is not None and server.process.poll() is not None:
            server.end()
            server = None
        if server is None:
            server = _servers[os.getpid()] = _start_server()
        return server


def _start_server() -> _Server:
    slow = SLOW_PACKAGES if _imports_packages else ()
    modules = [name for name in sys.modules if name.partition(".")[0] in slow]
    ours, theirs = socket.socketpair()
    numbers = (str(theirs.fileno()), str(len(modules)))
    command = [sys.executable, "-c", CODE, *numbers, *modules, *map(str, sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    theirs.close()
    atexit.register(_end_own)
    return _Server(process, ours)


def _end(server: _Server, *, is_of_no_use: bool = False) -> None:
    global _imports_packages
    with _lock:
        if is_of_no_use:
            _imports_packages = False
        if _servers.get(os.getpid()) is server:
            del _servers[os.getpid()]
            server.end()


def _end_own() -> None:
    if (server := _servers.get(os.getpid())) is not None:
        _end(server)


def serve(door_number: int, *, modules: Sequence[str] = ()) -> None:
    """Fork a child for each connection until no client is left; this is the server."""
    from flatout.memory.trace.make_trace import import_before_forking

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is this process's parent's to judge
    import_before_forking()
    for module in modules:
        with contextlib.suppress(ImportError):  # a module that exists under this name in that process only
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children answer by themselves and are not waited for
    door = socket.socket(fileno=door_number)
    door.settimeout(IDLE_S)
    while True:
        try:
            word, numbers, _, _ = socket.recv_fds(door, 1, 1)
        except TimeoutError:
            return
        if not word:
            return
        with warnings.catch_warnings():  # of threads that a fork leaves behind: the child uses none of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            is_child = os.fork() == 0
        if is_child:
            door.close()
            _answer(Connection(numbers[0]))
        os.close(numbers[0])


def _answer(pipe: Connection) -> None:
    """Do what is asked, in a child of the server, and end; at once if it cannot use CUDA."""
    import cloudpickle
    import torch

    if torch.cuda._is_in_bad_fork():
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        pipe.send(os.getpid())
        pipe.send_bytes(cloudpickle.dumps(answer_of(_run_asked, (pipe,), {})))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_asked(pipe: Connection) -> Any:
    surroundings: Surroundings = pipe.recv()
    surroundings.take()
    try:
        function, args = pipe.recv()
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"another process cannot import what the job is made of: {error}",
            hint="start where its modules can be imported, or plan before a GPU or a backward is used",
        ) from error
    return function(*args)
