from __future__ import annotations

import os
import time

import torch

from flatout.measure.run.ranks.unwatched import LEAST_S, UNWATCHED, Offspring, unwatched_processes


def in_child(work: object) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_forked_process_that_trains_lets_its_parent_know() -> None:
    offspring = Offspring()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    in_child(offspring.watch)
    optimizer.step()
    assert not offspring.trains  # the child has not trained, and the parent's own steps do not count

    def train() -> None:
        offspring.watch()
        optimizer.step()
        optimizer.step()

    in_child(train)
    assert offspring.trains


def test_what_processes_compute_counts_while_they_live_and_afterwards() -> None:
    reads, writes = os.pipe()

    def compute() -> None:
        while time.process_time() < 1.5 * LEAST_S:
            pass
        os.write(writes, b"done")
        time.sleep(60.0)

    child = os.fork()
    if child == 0:
        compute()
    os.read(reads, 4)
    said = unwatched_processes()
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert said is not None and said.startswith(UNWATCHED)
    assert unwatched_processes() is not None
