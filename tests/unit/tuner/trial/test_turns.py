"""Processes start together, take their steps in turn, and none waits for one that has ended."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from flatout.tuner.trial import turns
from flatout.tuner.trial.turns import TrialTurn, Turns, wait_for_turn, wait_until_quiet

STEPS = """
import os, sys, time
ready, goes = map(int, sys.argv[1:3])
if sys.argv[3] == "raises":
    sys.exit(1)
os.write(ready, b"1")
if sys.argv[3] == "is killed":
    os.kill(os.getpid(), 9)
os.read(goes, 1)
print(time.monotonic())
time.sleep(0.05)
print(time.monotonic())
"""


def run(turn: TrialTurn, how: str, found: dict[TrialTurn, str]) -> None:
    command = [sys.executable, "-c", STEPS, *map(str, turn.of_child), how]
    process = subprocess.Popen(command, pass_fds=turn.of_child, stdout=subprocess.PIPE, text=True)
    turn.begin(process, limit_s=60.0)
    found[turn] = process.communicate()[0]
    turn.end()


def test_processes_run_one_after_the_other_and_pass_over_those_that_ended() -> None:
    hows = ["", "raises", "", "is killed", ""]
    order, found = Turns(len(hows)).all(), dict[TrialTurn, str]()
    threads = [
        threading.Thread(target=run, args=(turn, how, found)) for turn, how in zip(order, hows, strict=True)
    ]
    for thread in reversed(threads):  # whoever is ready first
        thread.start()
    for thread in threads:
        thread.join(60)
    spans = [tuple(map(float, found[turn].split())) for turn in order if found[turn]]
    assert len(spans) == hows.count("")
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_a_process_that_never_gets_ready_is_late() -> None:
    (turn,) = Turns(1).all()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=turn.of_child)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            turn.begin(process, limit_s=0.2)
    finally:
        turn.end()
        turn.end()  # twice is no harm
        process.kill()
        process.wait()


def test_a_process_says_when_it_is_ready_and_how_long_it_waited() -> None:
    ready, told = os.pipe()
    goes, go = os.pipe()
    os.write(go, b"1")
    assert 0 <= wait_for_turn((told, goes)) < 60
    assert os.read(ready, 2) == b"1"
    for each in (ready, go):
        os.close(each)
    assert wait_for_turn((told, goes)) < 60  # a script may have closed them: then nobody waits


def test_the_first_turn_begins_once_nobody_works(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = itertools.chain([1.0, 1.1, 1.2], itertools.repeat(1.2))
    looks: list[object] = []
    monkeypatch.setattr(turns, "_used_s", lambda pids: (looks.append(pids), next(used_s))[1])
    wait_until_quiet([1])
    assert len(looks) == 4  # two of them saw work
    monkeypatch.setattr(turns, "SETTLES_S", 0.3)
    monkeypatch.setattr(turns, "_used_s", lambda pids: time.monotonic())
    began_s = time.monotonic()
    wait_until_quiet([1])  # it works on and on
    assert time.monotonic() - began_s >= 0.3


def test_the_work_of_processes_is_that_of_their_children_too() -> None:
    now_s = time.process_time()
    own_s = turns._used_s([os.getpid(), 2**22 + 1])  # the second one is gone
    assert own_s >= 0.9 * now_s > 0
