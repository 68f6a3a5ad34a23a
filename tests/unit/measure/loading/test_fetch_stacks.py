from __future__ import annotations

import ast
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from flatout.measure.evidence import FetchLine, Place, StackPath, Stacks
from flatout.measure.loading import fetch_stacks
from flatout.measure.loading.fetch_stacks import FetchStacks, fetch_lines, lines_of
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)
LOOP = Place(file="train.py", line=9, function="train")
MODEL = Place(file="model.py", line=3, function="forward")
READ = Place(file="data.py", line=5, function="Files.__getitem__")
PAD = Place(file="data.py", line=21, function="collate")


def spend(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(50))  # at: spent


def make_batch(stacks: FetchStacks, make: Callable[[], None]) -> tuple[FetchLine, ...]:
    stacks.begin()
    make()
    return stacks.end()


def test_a_process_names_the_lines_in_which_it_makes_batches() -> None:
    before_s = sys.getswitchinterval()
    stacks = FetchStacks(UserCode(str(HERE.parent)))
    spend(0.02)  # no batch is made here
    found = [line.place for line in make_batch(stacks, lambda: spend(0.1))]
    assert Place(file=HERE.name, line=line_of(HERE, "spent"), function="spend") in found
    assert {place.function for place in found if place is not None} == {"spend"}
    stacks.in_collate = True
    # the lines above the caller are not the dataset's, though they are the user's
    collated = make_batch(stacks, functools.partial(time.sleep, 0.02))
    assert all(line.place is None and line.in_collate for line in collated)
    stacks.stop()
    assert sys.getswitchinterval() == before_s


def test_the_library_that_a_line_calls_is_known() -> None:
    stacks = FetchStacks(UserCode(str(HERE.parent)))
    text, until = "a = 1\n" * 300, time.perf_counter() + 30.0

    def parse() -> None:
        while not any(key[2] for key in list(stacks._found)) and time.perf_counter() < until:
            ast.parse(text)  # at: parsed

    found = make_batch(stacks, parse)
    stacks.stop()
    (called,) = [each for each in found if each.library is not None]
    assert called.library == "ast" and called.place is not None
    assert called.place.line == line_of(HERE, "parsed")


def test_a_few_batches_are_enough() -> None:
    stacks = FetchStacks(UserCode(str(HERE.parent)))
    stacks._num_batches = fetch_stacks.MOST_BATCHES - 1
    assert not stacks.is_enough
    make_batch(stacks, lambda: None)
    assert stacks.is_enough
    stacks.stop()


def test_lines_come_with_their_looks_most_first() -> None:
    found = Counter({(READ, False, "PIL"): 3, (None, True, None): 7})
    assert lines_of(found) == (
        FetchLine(place=None, in_collate=True, samples=7),
        FetchLine(place=READ, in_collate=False, samples=3, library="PIL"),
    )


def test_a_training_thread_that_makes_its_batches_is_told_by_its_stacks() -> None:
    paths = (
        StackPath(phase="forward", places=(LOOP, MODEL), samples=50),
        StackPath(phase="wait", places=(LOOP, READ), samples=30, library="PIL"),
        StackPath(phase="wait", places=(LOOP, PAD), samples=20),
        StackPath(phase="wait", places=(LOOP,), samples=5),
    )
    stacks = Stacks(num_steps=4, samples_by_phase={"wait": 55, "forward": 50}, paths=paths)
    assert fetch_lines(stacks, collate=PAD) == (
        FetchLine(place=READ, in_collate=False, samples=30, library="PIL"),
        FetchLine(place=PAD, in_collate=True, samples=20),
        FetchLine(place=None, in_collate=False, samples=5),
    )
