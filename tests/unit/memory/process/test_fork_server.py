"""The server that forks where this process cannot: what its children have, and when it goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.memory.process import fork_server
from flatout.memory.process.fork_server import answer_from_server
from flatout.memory.process.isolated_process import open_answer
from flatout.memory.process.parcel import pack


def ask(function: Callable[..., Any], *args: Any) -> Any:
    return open_answer(answer_from_server(pack(function, args)))


def test_a_child_of_the_server_has_what_a_forked_one_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(os.getpid)  # started before all that follows
    (tmp_path / "beside_the_script.py").write_text("WIDTH = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--width", "7"])
    monkeypatch.setenv("FLATOUT_TEST", "here")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)

    def look() -> list[Any]:
        import beside_the_script  # type: ignore[import-not-found]

        found = [os.environ.get("FLATOUT_TEST"), os.environ.get("PATH"), os.getcwd(), sys.argv]
        return [beside_the_script.WIDTH, torch.ones(1).dtype, *found]

    assert ask(look) == [7, torch.float64, "here", None, str(tmp_path), ["train.py", "--width", "7"]]


def test_one_server_answers_many_at_once() -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(lambda _: ask(lambda: (os.getppid(), os.getpid())), range(8)))
    servers, children = zip(*found, strict=True)
    assert len(set(servers)) == 1 and len(set(children)) == 8
    assert os.getpid() not in servers


def test_a_server_that_has_ended_is_started_again() -> None:
    first = ask(os.getppid)
    server = fork_server._servers[os.getpid()]
    assert server.process.pid == first
    server.process.kill()
    server.process.wait()
    assert ask(os.getppid) != first


def test_slow_packages_are_imported_before_the_fork_where_that_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {
        "harmless_package": "",
        "missing_package": "raise ImportError('not here')",
        "asking_package": "import torch; torch.cuda._is_in_bad_fork = lambda: True",  # as if it asked CUDA
    }
    for name, text in slow.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fork_server, "SLOW_PACKAGES", set(slow))
    monkeypatch.setattr(fork_server, "_imports_packages", True)

    def imported(*names: str) -> list[str]:
        fork_server._end_own()
        for name in names:
            monkeypatch.setitem(sys.modules, name, type(sys)(name))
        found: list[str] = ask(lambda: sorted(slow.keys() & sys.modules.keys()))
        return found

    assert imported("harmless_package", "missing_package") == ["harmless_package"]
    assert imported("asking_package") == []


def test_what_another_process_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = type(sys)("made_up_here")
    exec("def function():\n    return 1\n", vars(made_up))
    monkeypatch.setitem(sys.modules, "made_up_here", made_up)
    with pytest.raises(
        BadInput, match="cannot import what the job is made of: No module named 'made_up_here'"
    ):
        ask(made_up.function)


def test_an_interrupt_ends_the_child_that_nobody_waits_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def wait_for_ever() -> None:
        with fifo.open("w"):
            signal.pause()

    def interrupt() -> bytes:
        with fifo.open("rb") as file:  # opens when the child does, and ends with it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            return file.read()

    with ThreadPoolExecutor(max_workers=1) as pool:
        ended = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(wait_for_ever)
        assert ended.result() == b""


def test_a_server_ends_without_work_and_with_its_parent() -> None:
    ends = []
    for idle_s in (0.01, 1000.0):
        ours, theirs = socket.socketpair()
        code = (
            "from flatout.memory.process import fork_server; from flatout.memory.trace import make_trace; "
            "make_trace.import_before_forking = lambda: None; "
            f"fork_server.IDLE_S = {idle_s}; fork_server.serve({theirs.fileno()})"
        )
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.close()
        ends.append((process, ours))
    ends[1][1].close()  # as the system does for a parent that is killed
    assert [process.wait() for process, _ in ends] == [0, 0]
    ends[0][1].close()
