"""A process that ends with its parent, one that is not told to, and one whose parent was gone already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from flatout.measure.run.lineage import ARM_FAILED, END, NOT_WRITTEN, end_with, is_orphan

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that it is orphaned"
)

# A parent that starts a child, says its number and waits; the child says when it is ready, and how it ends.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import signal, sys
from flatout.measure.run.lineage import END, end_with
def told(number, frame):
    print("told", flush=True)
    sys.exit()
signal.signal(END, told)
end_with({parent})
print("ready", flush=True)
{then}
"""


def killed_parent(*, parent: str, then: str) -> list[str]:
    """What a child says once its parent was killed; it ends when the pipe that both hold does."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(parent=parent, then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    try:
        process.stdin.close()
        return process.stdout.read().splitlines()
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            os.kill(child, signal.SIGKILL)


def test_a_process_ends_with_its_parent() -> None:
    assert killed_parent(parent="int(sys.argv[1])", then="signal.pause()") == ["told"]


def test_a_process_that_was_not_told_so_outlives_its_parent() -> None:
    assert killed_parent(parent="None", then="sys.stdin.read(); print('went on')") == ["went on"]


def test_a_parent_that_was_gone_already(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr("flatout.measure.run.lineage._ask_kernel", lambda wish, value: None)
    monkeypatch.setattr(os, "kill", lambda *sent: ended.append(sent))
    end_with(os.getppid())
    assert ended == []
    end_with(2**22 + 1)
    assert ended == [(os.getpid(), END)]


def test_an_orphan_has_another_parent() -> None:
    assert is_orphan(2**22 + 1)
    assert not is_orphan(os.getppid())
    assert not is_orphan(None)


def test_the_exit_codes_differ_from_each_other_and_from_those_scripts_end_with() -> None:
    assert ARM_FAILED != NOT_WRITTEN
    # 0 clean, 1 a traceback, 2 a usage error, 128 and above a signal
    assert all(2 < code < 128 for code in (ARM_FAILED, NOT_WRITTEN))
