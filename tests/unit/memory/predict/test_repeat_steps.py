"""More steps than a trace has: every later one is the second again, on what the one before it left."""

from __future__ import annotations

import numpy as np
import pytest

from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.allocator import allocated_series, round_bytes, simulate
from flatout.memory.predict.repeat_steps import repeat_steps
from flatout.memory.predict.replay import SizedTrace, with_own_sizes
from tests.support.memory import TraceBuilder, language_model_job, traced

MIB = 2**20


@pytest.fixture(scope="module")
def step() -> SizedTrace:
    return with_own_sizes(traced(language_model_job(), Recipe(clip_norm=1.0), batch_size=16))


def two_steps(*, left: int = 6 * MIB) -> SizedTrace:
    """Parameters, and in each step an activation and gradients that live on until the next."""
    build = TraceBuilder()
    build.mark("first", "forward")
    build.death(build.birth(40 * MIB, "activations", "aten.mm.default"))
    gradient = build.birth(6 * MIB, "gradients", "gradient")
    build.mark("next", "forward")
    build.death(gradient)
    build.death(build.birth(40 * MIB, "activations", "aten.mm.default"))
    build.birth(left, "gradients", "gradient")
    return with_own_sizes(build.trace(batch_size=1))


def test_every_storage_is_born_once_and_dies_at_most_once(step: SizedTrace) -> None:
    run = repeat_steps(step, num_steps=5)
    births, deaths = run.events[run.events >= 0], ~run.events[run.events < 0]
    assert sorted(births.tolist()) == list(range(len(run.num_bytes)))
    assert len(set(deaths.tolist())) == len(deaths)
    born_at = np.empty(len(run.num_bytes), np.int64)
    born_at[births] = np.flatnonzero(run.events >= 0)
    assert (born_at[deaths] < np.flatnonzero(run.events < 0)).all()


def test_a_later_step_holds_what_the_second_holds(step: SizedTrace) -> None:
    run = repeat_steps(step, num_steps=4)
    series = allocated_series(run.events, round_bytes(run.num_bytes))
    ends = (*run.starts[1:], len(series))
    held = [series[start:end].tolist() for start, end in zip(run.starts, ends, strict=True)]
    assert len(run.starts) == 3
    assert held[0] == held[1] == held[2]


def test_the_trace_itself_comes_first(step: SizedTrace) -> None:
    run = repeat_steps(step)
    assert run.events[: len(step.trace.events)].tolist() == step.trace.events.tolist()
    assert run.num_bytes[: len(step.num_bytes)].tolist() == step.num_bytes.tolist()


def test_a_step_that_leaves_something_else_is_not_repeated() -> None:
    found = two_steps(left=7 * MIB)
    run = repeat_steps(found, num_steps=4)
    assert run.events.tolist() == found.trace.events.tolist()
    assert len(run.starts) == 1


def test_a_trace_of_one_step_stays_as_it_is() -> None:
    build = TraceBuilder()
    build.mark("first", "forward")
    build.birth(MIB, "activations", "aten.mm.default")
    run = repeat_steps(with_own_sizes(build.trace(batch_size=1)))
    assert run.events.tolist() == [0] and run.starts == ()


def test_flushes_of_a_settled_step_are_counted(step: SizedTrace) -> None:
    """From the most that is allocated to the most that is reserved: nothing trains, some flush, then none."""
    free = simulate(step.trace.events, step.num_bytes)
    caps = range(free.peak_allocated_bytes, free.peak_reserved_bytes + MIB, MIB)
    counts = [repeat_steps(step).flushes(cap_bytes=cap) for cap in caps]
    assert counts[0] is None and counts[-1] == 0
    assert any(counts)


def test_a_step_that_does_not_fit_has_no_flushes() -> None:
    assert repeat_steps(two_steps()).flushes(cap_bytes=20 * MIB) is None
