from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from flatout.measure.process.own_thread import OwnThread

FORKS = """
import os, sys, threading

def show_threads():
    print(len(os.listdir("/proc/self/task")), threading.active_count(), flush=True)

os.register_at_fork(before=show_threads)  # Python calls the hook of the thread first: the last one
from flatout.measure.process.own_thread import OwnThread

began = threading.Semaphore(0)

def work(leave):
    began.release()
    leave.wait()

thread = OwnThread(work, name="ours")
thread.start()
for _ in range(3):
    began.acquire()
    child = os.fork()
    if child == 0:
        thread.stop()
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
began.acquire()
show_threads()
thread.stop()
thread.join()
if os.fork() == 0:
    os._exit(0)
assert not began.acquire(blocking=False)
"""


KEEPS = """
import os, threading, warnings
from flatout.measure.process import own_thread

def fork():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        child = os.fork()
        if child == 0:
            os._exit(own_thread.HIDES in warnings.filters)
        os.waitpid(child, 0)
        # as Python 3.12 and later do
        warnings.warn("This process (pid=1) is multi-threaded, use of fork()", DeprecationWarning)
        warnings.warn("another", DeprecationWarning)
    return sorted({str(each.message)[:12] for each in seen})

ours = own_thread.OwnThread(lambda leave: leave.wait(), name="ours")
ours.start()
with own_thread.torch_keeps_threads():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(fork())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(fork())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system's list of threads is Linux's")
def test_a_fork_is_warned_of_the_jobs_threads_but_not_of_one_that_torch_keeps_for_us() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KEEPS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["['another']", "['This process', 'another']"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system's list of threads is Linux's")
def test_it_is_away_at_forks_and_comes_back_in_the_old_process() -> None:
    # Python 3.12 and later warn of threads at a fork, as an error here
    command = [sys.executable, "-W", "error", "-c", FORKS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["1 1"] * 3 + ["2 2", "1 1"]


def test_work_that_ends_by_itself_does_not_come_back() -> None:
    began = threading.Semaphore(0)
    thread = OwnThread(lambda leave: began.release(), name="ours")
    thread.start()
    thread.join()
    thread.go_away()
    thread.come_back()
    assert began.acquire(blocking=False)
    assert not began.acquire(blocking=False)
