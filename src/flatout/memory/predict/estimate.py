"""What a training step takes of the GPU, by component and by phase, and which operation is at the peak.

A trace gives the storages, the simulated allocator the block that each is given (a block may be larger than
its storage) and the segments that hold the blocks.  *Allocated* is the sum of the blocks in use, *reserved*
what the allocator took from the driver, and the *process* takes the CUDA context on top, which no allocator
sees.  What libraries keep from the first matrix product on is part of the trace.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.ground.codec import encode
from flatout.ground.decisions import Decision
from flatout.ground.units import show_bytes, show_share
from flatout.hardware.device import Device
from flatout.memory.jobs.job import StepPhase
from flatout.memory.predict.allocator import allocated_series
from flatout.memory.predict.notes import notes_of
from flatout.memory.predict.repeat_steps import repeat_steps
from flatout.memory.predict.replay import SizedTrace, with_own_sizes
from flatout.memory.trace.record import COMPONENTS, Component, Guess, Trace

FORMAT = "flatout-memory-estimate"
VERSION = 1
MAX_POINTS = 400

WorkspaceBytes = Decision[tuple[int, ...]]
NO_WORKSPACES: WorkspaceBytes = Decision(value=(), reason="none beyond those in the trace", source="computed")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Bytes in use over one step, reduced to the points where they are largest."""

    step: str  # "first" or "next"
    events: tuple[int, ...]  # how many events into the step each point lies
    phases: tuple[tuple[int, StepPhase], ...]  # (events into the step, phase that begins there)
    by_component: dict[Component, tuple[int, ...]]
    peak: int | None  # index of the point at which the whole estimate peaks, if it lies in this step

    def total_bytes(self) -> tuple[int, ...]:
        return tuple(sum(point) for point in zip(*self.by_component.values(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The memory of a step at `sizes`."""

    sizes: dict[str, int]
    traced_at: dict[str, int]  # the sizes of the trace it comes from; others than `sizes` after a replay
    precision: str | None
    device: str | None
    num_parameters: int
    num_trainable: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int | None
    process_bytes: int | None
    num_flushes: int
    fits: bool | None  # None: no capacity was asked about
    by_component: dict[Component, int]
    by_phase: dict[StepPhase, int]
    peak_op: str | None
    peak_phase: StepPhase
    peak_step: str
    peak_module: str | None
    timeline: MemoryTimeline
    workspaces: WorkspaceBytes
    guesses: tuple[Guess, ...]
    native: bool = False  # PyTorch chose the kernels, on the GPU of this machine; else our rules of CUDA
    notes: tuple[str, ...] = ()  # what it leans on beside PyTorch's own rules

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **encode(self)}

    def plot(self, path: Path | str, *, capacity_bytes: int | None = None) -> None:
        """Draw the memory over the step, stacked by component, as PNG or SVG."""
        from flatout.memory.plot import plot_estimate

        plot_estimate(self, Path(path), capacity_bytes=capacity_bytes)

    def __str__(self) -> str:
        return "\n".join([*_heading(self), "", *_component_table(self), "", *_phase_table(self)])


def estimate(
    trace: Trace | SizedTrace,
    *,
    workspaces: WorkspaceBytes = NO_WORKSPACES,
    context_bytes: int | None = None,
    expandable_segments: bool = False,
    precision: str | None = None,
    device: Device | None = None,
) -> MemoryEstimate:
    """Return the estimate of one traced or replayed step."""
    found = with_own_sizes(trace) if isinstance(trace, Trace) else trace
    trace = found.trace
    done = found.simulate(expandable_segments=expandable_segments)
    # A third step may find no hole where the second found one: what is reserved is what a run settles at.
    settled = repeat_steps(found).simulate(expandable_segments=expandable_segments)
    series = allocated_series(trace.events, done.block_bytes)
    peak = _peak(trace.marks, series)
    step, phase = _step_and_phase(trace.marks, peak)
    storage = trace.storages[int(trace.events[peak])] if len(series) else None
    return MemoryEstimate(
        sizes=dict(found.sizes),
        traced_at=dict(trace.sizes),
        precision=precision,
        device=device.name if device else None,
        num_parameters=trace.num_parameters,
        num_trainable=trace.num_trainable,
        peak_allocated_bytes=done.peak_allocated_bytes,
        peak_reserved_bytes=settled.peak_reserved_bytes,
        context_bytes=context_bytes,
        process_bytes=None if context_bytes is None else settled.peak_reserved_bytes + context_bytes,
        num_flushes=done.num_flushes,
        fits=None,
        by_component=_at(trace, done.block_bytes, peak),
        by_phase=_phase_peaks(trace.marks, series),
        peak_op=storage.op if storage else None,
        peak_phase=phase,
        peak_step=step,
        peak_module=storage.module if storage else None,
        timeline=_timeline(trace, done.block_bytes, series, peak),
        workspaces=workspaces,
        guesses=trace.guesses,
        native=trace.native,
        notes=notes_of(trace, device),
    )


def _at(trace: Trace, block_bytes: NDArray[np.int64], event: int) -> dict[Component, int]:
    """Return the bytes in use by component after `event`."""
    return {
        component: int(values[0]) if len(values) else 0
        for component, values in _component_series(trace, block_bytes, np.array([event])).items()
    }


def _component_series(
    trace: Trace, block_bytes: NDArray[np.int64], picked: NDArray[np.int64]
) -> dict[Component, NDArray[np.int64]]:
    if not len(trace.events):
        return {component: np.zeros(0, np.int64) for component in COMPONENTS}
    numbers = {component: index for index, component in enumerate(COMPONENTS)}
    components = np.array([numbers[storage.component] for storage in trace.storages], np.int8)
    births = trace.events >= 0
    storages = np.where(births, trace.events, ~trace.events)
    moved = np.where(births, block_bytes[storages], -block_bytes[storages])
    codes = components[storages]
    return {
        component: np.cumsum(np.where(codes == index, moved, 0))[picked]
        for component, index in numbers.items()
    }


def _step_and_phase(marks: tuple[tuple[int, str, StepPhase], ...], event: int) -> tuple[str, StepPhase]:
    found: tuple[str, StepPhase] = ("first", "setup")
    for at, step, phase in marks:
        if at <= event:
            found = (step, phase)
    return found


def _phase_peaks(
    marks: tuple[tuple[int, str, StepPhase], ...], series: NDArray[np.int64]
) -> dict[StepPhase, int]:
    """Return the most bytes in use in each phase, in either step, from its start on."""
    peaks: dict[StepPhase, int] = {}
    starts: list[tuple[int, StepPhase]] = [(0, "setup"), *((at, phase) for at, _step, phase in marks)]
    for (start, phase), (end, _next) in zip(starts, [*starts[1:], (len(series), "setup")], strict=True):
        held = series[max(0, start - 1) if phase != "setup" else start : end]
        peaks[phase] = max(peaks.get(phase, 0), int(held.max(initial=0)))
    return peaks


def _peak(marks: tuple[tuple[int, str, StepPhase], ...], series: NDArray[np.int64]) -> int:
    """Return the event at the peak; the second step's, if it reaches as high as the first."""
    if not len(series):
        return 0
    start, end = _bounds(marks, "next", len(series))
    if end > start and series[start:end].max() == series.max():
        return start + int(series[start:end].argmax())
    return int(series.argmax())


def _timeline(
    trace: Trace, block_bytes: NDArray[np.int64], series: NDArray[np.int64], peak: int
) -> MemoryTimeline:
    """Return the step in which the peak lies."""
    step, _phase = _step_and_phase(trace.marks, peak)
    start, end = _bounds(trace.marks, step, len(series))
    picked = _thin_out(series[start:end], MAX_POINTS) + start
    by_component = _component_series(trace, block_bytes, picked)
    return MemoryTimeline(
        step=step,
        events=tuple((picked - start).tolist()),
        phases=tuple((at - start, phase) for at, name, phase in trace.marks if name == step),
        by_component={name: tuple(values.tolist()) for name, values in by_component.items()},
        peak=int(np.flatnonzero(picked == peak)[0]) if start <= peak < end else None,
    )


def _bounds(marks: tuple[tuple[int, str, StepPhase], ...], step: str, num_events: int) -> tuple[int, int]:
    """Return the first event of a step and the one after its last."""
    starts = [at for at, name, _phase in marks if name == step]
    if not starts:
        return (num_events, num_events)
    later = [at for at, name, _phase in marks if name != step and at > starts[-1]]
    return (starts[0], min(later, default=num_events))


def _thin_out(series: NDArray[np.int64], max_points: int) -> NDArray[np.int64]:
    """Pick at most `max_points` indices: first, last, and the largest value of each equal stretch."""
    if len(series) <= max_points:
        return np.arange(len(series))
    edges = np.linspace(0, len(series), max_points - 1).astype(np.int64)
    tops = [int(low + series[low:high].argmax()) for low, high in itertools.pairwise(edges)]
    return np.unique([0, *tops, len(series) - 1])


def _heading(found: MemoryEstimate) -> list[str]:
    sizes = " ".join(f"{name}={value}" for name, value in found.sizes.items())
    about = ", ".join(part for part in (sizes, found.precision, found.device) if part)
    if found.traced_at != found.sizes:
        traced = " ".join(f"{name}={value}" for name, value in found.traced_at.items())
        about += f" (replayed from a trace at {traced})"
    place = f" of {found.peak_module}" if found.peak_module else ""
    lines = [about]
    lines.append(
        f"allocated  {show_bytes(found.peak_allocated_bytes):>9}  at the peak: {found.peak_phase} of the "
        f"{found.peak_step} step, {found.peak_op}{place}"
    )
    lines.append(f"reserved   {show_bytes(found.peak_reserved_bytes):>9}")
    context = f"with {show_bytes(found.context_bytes)} of CUDA context"
    lines.append(f"process    {show_bytes(found.process_bytes):>9}  {context if found.context_bytes else ''}")
    if found.native:
        lines.append("traced natively: PyTorch chose the kernels, for the GPU of this machine")
    return [line.rstrip() for line in (*lines, *(f"note: {note}" for note in found.notes))]


def _component_table(found: MemoryEstimate) -> list[str]:
    total = found.peak_allocated_bytes or 1
    return [
        f"{name:<18}{show_bytes(num_bytes):>9}  {show_share(num_bytes / total):>6}"
        for name, num_bytes in found.by_component.items()
        if num_bytes
    ]


def _phase_table(found: MemoryEstimate) -> list[str]:
    return [f"peak in {name:<10}{show_bytes(num_bytes):>9}" for name, num_bytes in found.by_phase.items()]
