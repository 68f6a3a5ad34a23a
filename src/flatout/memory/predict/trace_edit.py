"""Add storages and events to a trace: what runs beside the step without being part of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import StepPhase
from flatout.memory.trace.record import Component, Storage, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMarks:
    """Where a step's phases begin among the events; `forward` is after the drop of old gradients."""

    start: int
    forward: int
    backward: int
    optimizer: int
    num_backwards: int


def steps_of(trace: Trace) -> list[StepMarks]:
    found = []
    for name in dict.fromkeys(name for _at, name, _phase in trace.marks):
        marks = [(at, phase) for at, step, phase in trace.marks if step == name]
        phases = [phase for _at, phase in marks]
        if "backward" not in phases or "optimizer" not in phases:
            raise BadInput(
                "several ranks can be planned only for training steps", hint="trace with mode='train'"
            )
        backward = phases.index("backward")
        found.append(
            StepMarks(
                start=marks[0][0],
                forward=marks[backward - 1][0],
                backward=marks[backward][0],
                optimizer=marks[phases.index("optimizer")][0],
                num_backwards=phases.count("backward"),
            )
        )
    if not found:
        raise BadInput("the trace has no step")
    return found


def gradients_of(trace: Trace, step: StepMarks) -> list[int]:
    """Return the gradients of a step in their order of birth."""
    events = trace.events[step.start : step.optimizer].tolist()
    return [event for event in events if event >= 0 and trace.storages[event].component == "gradients"]


class Edit:
    """The events to add to a trace and to drop from it.

    Events in `before[i]` come before event i and before a mark there, those in `after[i]` between that mark
    and the event.
    """

    def __init__(self, trace: Trace) -> None:
        self.origin = trace
        self.storages = list(trace.storages)
        self.before: dict[int, list[int]] = defaultdict(list)
        self.after: dict[int, list[int]] = defaultdict(list)
        self.dropped: set[int] = set()  # events
        events = trace.events.tolist()
        self.births = {event: at for at, event in enumerate(events) if event >= 0}
        self.deaths = {~event: at for at, event in enumerate(events) if event < 0}

    def storage(
        self, num_bytes: int, component: Component, phase: StepPhase, op: str, module: str = ""
    ) -> int:
        added = Storage(num_bytes=num_bytes, component=component, phase=phase, op=op, module=module or None)
        self.storages.append(added)
        return len(self.storages) - 1

    def resize(self, number: int, num_bytes: int) -> None:
        self.storages[number] = dataclasses.replace(self.storages[number], num_bytes=num_bytes, formula=None)

    def drop_death(self, number: int) -> None:
        if number in self.deaths:
            self.dropped.add(self.deaths[number])

    def trace(self) -> Trace:
        events: list[int] = []
        marks: list[tuple[int, str, StepPhase]] = []
        waiting = list(self.origin.marks)
        old: list[int] = self.origin.events.tolist()
        for at in range(len(old) + 1):
            events += self.before[at]
            while waiting and waiting[0][0] == at:
                _at, step, phase = waiting.pop(0)
                marks.append((len(events), step, phase))
            events += self.after[at]
            if at < len(old) and at not in self.dropped:
                events.append(old[at])
        return dataclasses.replace(
            self.origin,
            storages=tuple(self.storages),
            events=np.array(events, dtype=np.int64),
            marks=tuple(marks),
        )
