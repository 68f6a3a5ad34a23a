"""Logs of one step made into those of a run: balanced, renumbered, summed in place."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.memory.jobs.job import StepPhase
from flatout.memory.predict.allocator import peak_allocated
from flatout.memory.trace.record import Component
from flatout.memory.trace.two_steps import (
    Born,
    LogEvent,
    alive_after,
    name_components,
    sum_in_place,
    two_steps,
)


def born(num_bytes: int = 1024, *, phase: StepPhase = "forward", component: Component | None = None) -> Born:
    return Born(num_bytes, "aten.mm", phase, None, component)


@st.composite
def raw_logs(draw: st.DrawFn) -> tuple[list[LogEvent], list[tuple[int, int]], int]:
    """Events in which each storage is born once and dies at most once, sums among them, and how many."""
    events: list[LogEvent] = []
    sums: list[tuple[int, int]] = []
    alive: list[int] = []
    count = 0
    for action in draw(st.lists(st.sampled_from(("birth", "death", "sum", "held sum")), max_size=60)):
        if action == "birth" or not alive:
            alive.append(count)
            events.append(count)
            count += 1
        elif action == "death":
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            first = alive[draw(st.integers(0, len(alive) - 1))]
            events.append(count)
            sums.append((count, first))
            alive.append(count)
            if action == "sum":  # nobody else holds the summand: it dies at once
                events.append(~first)
                alive.remove(first)
            count += 1
    return events, sums, count


def balanced(events: list[LogEvent]) -> bool:
    alive: set[int] = set()
    seen: set[int] = set()
    for event in events:
        assert isinstance(event, int)
        number = event if event >= 0 else ~event
        if event >= 0:
            if number in seen:
                return False
            seen.add(number)
            alive.add(number)
        elif number in alive:
            alive.remove(number)
        else:
            return False
    return True


@given(raw_logs())
def test_sums_in_place_keep_births_and_deaths_balanced(
    log: tuple[list[LogEvent], list[tuple[int, int]], int],
) -> None:
    events, sums, _count = log
    assert balanced(events)
    result = sum_in_place(events, sums)
    assert balanced(result)
    assert len(result) <= len(events)
    assert len(alive_after(result)) == len(alive_after(events))


@given(raw_logs())
def test_sums_in_place_never_raise_the_peak(log: tuple[list[LogEvent], list[tuple[int, int]], int]) -> None:
    events, sums, count = log
    sizes = [100] * count

    def peak(events: list[LogEvent]) -> int:
        live = most = 0
        for event in events:
            assert isinstance(event, int)
            live += sizes[event] if event >= 0 else -sizes[~event]
            most = max(most, live)
        return most

    assert peak(sum_in_place(events, sums)) <= peak(events)


def test_a_sum_takes_the_place_of_a_summand_that_dies_with_it() -> None:
    assert sum_in_place([0, 1, 2, ~0, ~1, ~2], [(2, 0)]) == [0, 1, ~1, ~0]


def test_a_sum_of_sums_stands_for_the_first_summand() -> None:
    assert sum_in_place([0, 1, ~0, 2, ~1, ~2], [(1, 0), (2, 1)]) == [0, ~0]


def test_a_summand_that_lives_on_keeps_its_own_place() -> None:
    events: list[LogEvent] = [0, 1, 2, ~1, ~0, ~2]
    assert sum_in_place(events, [(1, 0)]) == events


@given(raw_logs(), st.data())
def test_in_two_steps_each_storage_is_born_once_and_dies_at_most_once(
    log: tuple[list[LogEvent], list[tuple[int, int]], int], data: st.DataObject
) -> None:
    events, sums, count = log
    start = data.draw(st.integers(0, len(events)))
    marked: list[LogEvent] = [*events[:start], "forward", *events[start:]]
    inside = {event for event in events[start:] if isinstance(event, int) and event >= 0}
    result = two_steps(
        marked, [born() for _ in range(count)], start=start, sums=[s for s in sums if s[0] in inside]
    )
    counts = Counter(result.events.tolist())
    assert set(counts.values()) <= {1}
    assert [event for event in result.events.tolist() if event >= 0] == list(range(len(result.storages)))
    assert balanced(result.events.tolist())
    assert [step for _at, step, _phase in result.marks] == ["first", "next"]


@given(raw_logs())
def test_the_next_step_starts_from_what_the_first_left(
    log: tuple[list[LogEvent], list[tuple[int, int]], int],
) -> None:
    """Both steps are the same without state: their peaks over what was there before are the same."""
    events, sums, count = log
    result = two_steps(["forward", *events], [born() for _ in range(count)], start=0, sums=sums)
    split = next(at for at, step, _phase in result.marks if step == "next")
    sizes = np.array([storage.num_bytes for storage in result.storages], dtype=np.int64)
    left_over = len(alive_after(result.events[:split].tolist()))
    first = peak_allocated(result.events[:split], sizes)
    assert peak_allocated(result.events, sizes) == max(first, left_over * 1024)


def test_gradients_are_dropped_and_state_is_kept() -> None:
    parts = [
        born(component="parameters", phase="setup"),
        born(phase="forward"),
        born(component="gradients", phase="backward"),
        born(component="optimizer state", phase="optimizer"),
        born(component="workspaces", phase="forward"),
    ]
    events: list[LogEvent] = [0, "forward", 1, 4, "backward", 2, ~1, "optimizer", 3]
    log = two_steps(events, parts, start=1)
    components = [storage.component for storage in log.storages]
    assert components.count("optimizer state") == components.count("parameters") == 1
    assert components.count("workspaces") == 1
    assert components.count("gradients") == components.count("activations") == 2
    (first_gradient, _second) = (i for i, component in enumerate(components) if component == "gradients")
    next_start = next(at for at, step, _phase in log.marks if step == "next")
    assert log.events[next_start] == ~first_gradient


def test_a_sum_that_is_a_gradient_makes_its_summand_one() -> None:
    parts = [born(phase="backward") for _ in range(4)]
    parts[3].component = "gradients"
    events: list[LogEvent] = ["backward", 0, 1, 2, ~0, ~1, 3, ~2]
    log = two_steps(events, parts, start=0, sums=[(2, 0), (3, 2)])
    alive = [log.storages[number].component for number in alive_after(log.events.tolist())]
    assert alive == ["gradients"]
    assert [storage.component for storage in log.storages] == ["gradients", "temporaries"] * 2


def test_what_is_hosted_or_left_behind_by_building_is_no_part_of_the_log() -> None:
    parts = [born(8), born(8, component="buffers"), born(4096), born(8, phase="optimizer")]
    log = two_steps([0, 1, 2, "forward", 3, ~0], parts, start=3, hosted={3})
    assert [storage.num_bytes for storage in log.storages] == [8, 4096]
    assert log.events.tolist() == [0, 1]


def test_what_is_alive_when_a_backward_begins_is_an_activation() -> None:
    parts = [born(), born(), born(phase="backward"), born(component="inputs")]
    names = name_components([3, 0, 1, ~1, "backward", 2, ~0, ~2], parts)
    assert names == ["activations", "temporaries", "temporaries", "inputs"]


def test_what_a_step_replaces_is_held_until_the_next_step_replaces_it_again() -> None:
    parts = [born(component="parameters", phase="setup"), born(phase="optimizer", component="parameters")]
    log = two_steps([0, "forward", "optimizer", 1, ~0], parts, start=1, replaced={0: 1})
    assert log.events.tolist() == [0, 1, ~0, 2, ~1]
