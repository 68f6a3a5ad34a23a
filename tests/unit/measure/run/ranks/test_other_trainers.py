from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch

from flatout.measure.run.ranks import other_trainers
from flatout.measure.run.ranks.other_trainers import UNWATCHED, OtherTrainers, describe_other_trainers


def in_child(work: object) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_forked_process_that_trains_lets_its_parent_know() -> None:
    others = OtherTrainers()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    in_child(others.watch)
    optimizer.step()
    assert not others.trains  # the child has not trained, and the parent's own steps do not count

    def train() -> None:
        others.watch()
        optimizer.step()
        optimizer.step()

    in_child(train)
    assert others.trains


def compute(done: Any) -> None:
    while time.process_time() < 1.5 * other_trainers.LEAST_S:
        pass
    done.send(None)
    done.recv()


@pytest.mark.parametrize("daemon", [False, True])
def test_what_processes_compute_counts_while_they_live_unless_they_are_workers(
    daemon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_trainers, "LEAST_S", 0.1)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=compute, args=(there,), daemon=daemon)
    child.start()
    here.recv()
    said = describe_other_trainers(ended=False)
    here.send(None)
    child.join()
    assert (said is None) == daemon
    assert said is None or said.startswith(UNWATCHED)
    assert describe_other_trainers(ended=False) is None
    assert describe_other_trainers(ended=True) is not None
