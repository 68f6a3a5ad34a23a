"""From the raw log of one traced step to the log of a run: what is there, a first step, and a next one.

The log of a tracer holds births, deaths and the names of phases as they begin.  Two things are corrected
here.  Where gradients of several uses meet, autograd adds into the first one if nobody else holds it; tensors
without data are added into a third, so such a sum is made one with its first summand.  And the step after the
first is the same step again, except that gradients are dropped at its start, that the optimizer's state and
the libraries' workspaces exist, and that what the first step replaced (a parameter, a running average) is
replaced once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.memory.cuda.formulas import Formula
from flatout.memory.jobs.job import StepPhase
from flatout.memory.trace.record import Component, Storage

STRAY_BYTES = 512
LogEvent = int | StepPhase  # i: storage i is born; ~i: it dies; a word: this phase begins


@dataclass(slots=True)
class Born:
    """A storage during the trace: what is known of it so far."""

    num_bytes: int
    op: str
    phase: StepPhase
    module: str | None
    component: Component | None = None
    formula: Formula | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepsLog:
    """Births and deaths of two steps, renumbered by birth."""

    storages: tuple[Storage, ...]
    events: NDArray[np.int64]
    marks: tuple[tuple[int, str, StepPhase], ...]


def two_steps(
    events: Sequence[LogEvent],
    born: Sequence[Born],
    *,
    start: int,
    hosted: Collection[int] = (),
    replaced: Mapping[int, int] | None = None,
    sums: Iterable[tuple[int, int]] = (),
) -> StepsLog:
    """Return what is alive at `start`, the step from there on, and the step after it.

    `hosted` storages live on the host and are left out; `replaced` maps storages from before the step to
    those in their place after it; `sums` are pairs of a sum and its first summand.
    """
    before = [number for number in alive_after(events[:start]) if not _is_stray(born[number])]
    strays = set(alive_after(events[:start])) - set(before)
    left_out = strays | set(hosted)
    pairs = list(sums)
    step = [event for event in sum_in_place(events[start:], pairs) if _number(event) not in left_out]
    components = name_components(step, born)
    _name_sums(components, step, born, pairs)
    inherited = set(before)
    births = {event for event in step if isinstance(event, int) and event >= 0}
    deaths = {~event for event in step if isinstance(event, int) and event < 0}
    state = {
        number
        for number in births
        if components[number] == "optimizer state"
        or (components[number] == "workspaces" and number not in deaths)
    }
    successors = {old: new for old, new in (replaced or {}).items() if new in births - deaths - state}
    dropped = [~number for number in sorted(births - deaths - state - set(successors.values()))]
    again: list[LogEvent] = []
    for event in step:
        number = _number(event)
        if number in inherited and _is_death(event):
            again += [~successors[number]] if number in successors else []
        elif number not in state:
            again.append(_move(event, len(born)))
    head = 1 if again and isinstance(again[0], str) else 0
    next_step = [*again[:head], *dropped, *again[head:]]
    return _renumber([("setup", before), ("first", step), ("next", next_step)], born, components)


def _is_stray(each: Born) -> bool:
    """Return whether it is a scalar that a library cached while the model was built: not part of the job."""
    return each.component is None and each.num_bytes <= STRAY_BYTES


def alive_after(events: Iterable[LogEvent]) -> list[int]:
    """List the storages that are alive after `events`, in order of birth."""
    alive: dict[int, None] = {}
    for event in events:
        if isinstance(event, str):
            continue
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return list(alive)


def sum_in_place(events: Sequence[LogEvent], sums: Iterable[tuple[int, int]]) -> list[LogEvent]:
    """Let a sum replace its first summand if that dies with it."""
    summand = dict(sums)
    result: list[LogEvent] = []
    standing_for: dict[int, int] = {}
    skipped: set[int] = set()
    for place, event in enumerate(events):
        if isinstance(event, str):
            result.append(event)
            continue
        number = event if event >= 0 else ~event
        if number in skipped and event < 0:
            skipped.discard(number)
            continue
        if event >= 0 and number in summand:
            first = summand[number]
            if _dies_next(events, place + 1, first):
                standing_for[number] = standing_for.get(first, first)
                skipped.add(first)
                continue
        real = standing_for.get(number, number)
        result.append(real if event >= 0 else ~real)
    return result


def _name_sums(
    components: list[Component],
    step: Sequence[LogEvent],
    born: Sequence[Born],
    sums: Sequence[tuple[int, int]],
) -> None:
    """Give the summand that stands for a sum the sum's component, such as "gradients"."""
    births = {event for event in step if isinstance(event, int) and event >= 0}
    known = {number: each.component for number, each in enumerate(born) if each.component is not None}
    for number, first in reversed(sums):
        if number in known and number not in births:
            known.setdefault(first, known[number])
            components[first] = known[first]


def _dies_next(events: Sequence[LogEvent], place: int, number: int) -> bool:
    while place < len(events):
        event = events[place]
        if isinstance(event, str) or event >= 0:
            return False
        if ~event == number:
            return True
        place += 1
    return False


def name_components(step: Sequence[LogEvent], born: Sequence[Born]) -> list[Component]:
    """Name what each storage is for; one that is alive when a backward begins is an activation."""
    components: list[Component] = [each.component or "temporaries" for each in born]
    alive: set[int] = set()
    for event in step:
        if isinstance(event, str):
            if event == "backward":
                for number in alive:
                    if born[number].component is None and born[number].phase == "forward":
                        components[number] = "activations"
        elif event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return components


def _number(event: LogEvent) -> int | None:
    return None if isinstance(event, str) else event if event >= 0 else ~event


def _is_death(event: LogEvent) -> bool:
    return isinstance(event, int) and event < 0


def _move(event: LogEvent, by: int) -> LogEvent:
    if isinstance(event, str):
        return event
    return event + by if event >= 0 else ~(~event + by)


def _renumber(
    parts: Sequence[tuple[str, Sequence[LogEvent]]], born: Sequence[Born], components: Sequence[Component]
) -> StepsLog:
    numbers: dict[int, int] = {}
    storages: list[Storage] = []
    events: list[int] = []
    marks: list[tuple[int, str, StepPhase]] = []
    for which, part in parts:
        for event in part:
            if isinstance(event, str):
                marks.append((len(events), which, event))
            elif event >= 0:
                numbers[event] = len(storages)
                events.append(len(storages))
                original = event % len(born)
                each = born[original]
                storages.append(
                    Storage(
                        num_bytes=each.num_bytes,
                        component=components[original],
                        phase=each.phase,
                        op=each.op,
                        module=each.module,
                        formula=each.formula,
                    )
                )
            else:
                events.append(~numbers[~event])
    return StepsLog(storages=tuple(storages), events=np.array(events, dtype=np.int64), marks=tuple(marks))
