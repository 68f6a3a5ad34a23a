"""A step at any size, from traces at a few small ones.

What a training step allocates at another batch size is the same sequence of births and deaths with other
numbers of bytes, and each storage's bytes are a polynomial of the batch size: constant (weights), linear
(activations) or quadratic (similarities within the batch).  Three traces fix it exactly, in integers.  The
same holds for a sequence length and for any knob of the job's own.  Several knobs at once mostly multiply
(batch × length × width), sometimes add (two inputs joined into one tensor): each is sampled on its own, and
one more trace with all of them moved decides between the forms, storage by storage.

Kernels that round a length up to a period (attention rounds to 128) are polynomial only among lengths that
leave the same rest, so a replay answers for those and refuses the others.  Where the sequence itself changes
with the sizes there is nothing to replay: `StructureChanges` names the first difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from flatout.ground.errors import BadInput, StructureChanges
from flatout.memory.predict.allocator import Simulation, peak_allocated, simulate
from flatout.memory.predict.samples import BATCH, NUM_POINTS, PERIODS, block_of
from flatout.memory.trace.record import Storage, Trace

Form = Literal["product", "sum", "batch times sum"]
ROUNDING = 1e-3  # bytes: what doubles may be off by
FORMS: tuple[Form, ...] = ("product", "sum", "batch times sum")
Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizedTrace:
    """The births and deaths of `trace` with the bytes that its storages have at `sizes`."""

    trace: Trace
    sizes: dict[str, int]
    num_bytes: Longs

    def peak_allocated_bytes(self) -> int:
        return peak_allocated(self.trace.events, self.num_bytes)

    def simulate(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> Simulation:
        """Return what the allocator does with the step."""
        return simulate(
            self.trace.events, self.num_bytes, cap_bytes=cap_bytes, expandable_segments=expandable_segments
        )


def with_own_sizes(trace: Trace) -> SizedTrace:
    """Return a trace at the sizes it was taken at."""
    return SizedTrace(trace=trace, sizes=dict(trace.sizes), num_bytes=_bytes_of(trace))


def _bytes_of(trace: Trace) -> Longs:
    return np.fromiter((storage.num_bytes for storage in trace.storages), np.int64, len(trace.storages))


def _numbers_of(trace: Trace) -> Longs:
    """Return what is a polynomial of the sizes: bytes without a formula, then the counts of formulas."""
    plain = [0 if storage.formula else storage.num_bytes for storage in trace.storages]
    counts = [count for storage in trace.storages if storage.formula for count in storage.formula.counts]
    return np.array([*plain, *counts], dtype=np.int64)


def _evaluate(trace: Trace, numbers: Longs) -> Longs:
    """Compute the bytes of every storage from `numbers`, which are laid out as in `_numbers_of`."""
    num_bytes = numbers[: len(trace.storages)].copy()
    counts = numbers[len(trace.storages) :].tolist()
    start = 0
    for index, storage in enumerate(trace.storages):
        if storage.formula is not None:
            end = start + len(storage.formula.counts)
            num_bytes[index] = storage.formula._replace(counts=tuple(counts[start:end])).num_bytes
            start = end
    return num_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knob:
    """Bytes of every storage along one size, the others at the base: Newton's forward differences."""

    name: str
    points: tuple[int, ...]  # evenly spaced
    period: int
    start: Longs
    first: Longs
    second: Longs
    exact: bool = True  # False: between the points, rounded up

    @property
    def step(self) -> int:
        return self.points[1] - self.points[0]

    def covers(self, value: int) -> bool:
        """Return whether the polynomial holds at `value`."""
        if not self.exact:
            return value >= 1
        if value < 1 or (value - self.points[0]) % self.step:
            return False
        block = block_of(self.period)
        return self.step % self.period == 0 or (value - 1) // block == (self.points[-1] - 1) // block

    def at(self, value: int) -> Longs:
        if not self.exact:
            steps_taken = (value - self.points[0]) / self.step
            bent = self.second * (steps_taken * (steps_taken - 1) / 2)
            found = self.start + self.first * steps_taken + bent
            rounded: Longs = np.ceil(found - ROUNDING).astype(np.int64)
            return rounded
        steps = (value - self.points[0]) // self.step
        found = self.start + self.first * steps
        if steps * (steps - 1):
            found += self.second * (steps * (steps - 1) // 2)
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """Any size of one job; made by `fit_replay`."""

    base: Trace
    num_bytes: Longs
    knobs: tuple[Knob, ...]
    forms: NDArray[np.int8]  # of each storage: index into FORMS
    traced: tuple[dict[str, int], ...]

    def covers(self, **sizes: int) -> bool:
        """Return whether `at` can answer for these sizes."""
        return not self._list_uncovered(sizes)

    def at(self, **sizes: int) -> SizedTrace:
        """Return the step at `sizes`; a size that is not given is the base's."""
        self._refuse_uncovered(sizes)
        wanted = {**self.base.sizes, **sizes}
        numbers = _combine({knob.name: knob.at(wanted[knob.name]) for knob in self.knobs}, self)
        num_bytes = _evaluate(self.base, numbers)
        if num_bytes.min(initial=0) < 0:
            storage = storage_name(self.base, int(num_bytes.argmin()))
            raise StructureChanges(
                f"{storage} would have less than 0 bytes at {show_sizes(wanted)}",
                hint="trace it at these sizes",
            )
        return SizedTrace(trace=self.base, sizes=wanted, num_bytes=num_bytes)

    def check(self, trace: Trace) -> None:
        """Raise unless a fresh trace is what this replay says for its sizes."""
        compare(self.base, trace)
        _refuse_difference(trace, self.at(**trace.sizes).num_bytes)

    def _list_uncovered(self, sizes: Mapping[str, int]) -> list[str]:
        knobs = {knob.name: knob for knob in self.knobs}
        return [
            f"{name}={value}"
            for name, value in sizes.items()
            if not (knobs[name].covers(value) if name in knobs else value == self.base.sizes.get(name))
        ]

    def _refuse_uncovered(self, sizes: Mapping[str, int]) -> None:
        uncovered = self._list_uncovered(sizes)
        if uncovered:
            traced = "; ".join(show_sizes(sizes) for sizes in self.traced)
            raise StructureChanges(
                f"{', '.join(uncovered)} does not follow from the traces at {traced}",
                hint="trace it at these sizes",
            )


def fit_replay(traces: Sequence[Trace], *, exact: bool = True) -> Replay:
    """Fit a replay to traces of one job at `sample_sizes`, in any order.

    Where sizes are shared out, as tokens among experts, no polynomial is exact between multiples of the
    number of shares: without `exact` such sizes are rounded up from traces at multiples.
    """
    base = _base_of(traces)
    for trace in traces:
        compare(base, trace)
    moved = {name for trace in traces for name in base.sizes if trace.sizes.get(name) != base.sizes[name]}
    knobs = tuple(
        _fit_knob(name, base, traces, period=PERIODS.get(name, 1), exact=exact)
        for name in sorted(moved, key=lambda name: (name != BATCH, name))
    )
    replay = Replay(
        base=base,
        num_bytes=_numbers_of(base),
        knobs=knobs,
        forms=np.zeros(len(_numbers_of(base)), np.int8),
        traced=tuple(dict(trace.sizes) for trace in traces),
    )
    crosses = [trace for trace in traces if _num_moved(base, trace) > 1]
    if len(knobs) > 1 and not crosses:
        names = ", ".join(knob.name for knob in knobs)
        raise BadInput(f"no trace moves {names} at once, so how they combine is not known")
    replay = _choose_forms(replay, crosses)
    for trace in traces:
        _refuse_difference(trace, replay.at(**trace.sizes).num_bytes)
    return replay


def _base_of(traces: Sequence[Trace]) -> Trace:
    """Find the trace from which most others differ in one size only; the smallest of equals."""
    if not traces:
        raise BadInput("a replay needs traces of the job at several sizes; there are none")
    if any(trace.sizes.keys() != traces[0].sizes.keys() for trace in traces):
        raise BadInput("the traces of a replay have different sizes: they are not of one job")

    def rank(trace: Trace) -> tuple[int, int]:
        alone = sum(_num_moved(trace, other) == 1 for other in traces)
        return (-alone, sum(trace.sizes.values()))

    return min(traces, key=rank)


def _num_moved(base: Trace, trace: Trace) -> int:
    return sum(trace.sizes[name] != value for name, value in base.sizes.items())


def _fit_knob(name: str, base: Trace, traces: Sequence[Trace], *, period: int, exact: bool) -> Knob:
    rows = {base.sizes[name]: _numbers_of(base)}
    for trace in traces:
        if _num_moved(base, trace) == 1 and trace.sizes[name] != base.sizes[name]:
            rows[trace.sizes[name]] = _numbers_of(trace)
    points = tuple(sorted(rows)[:NUM_POINTS])
    step = points[1] - points[0] if len(points) > 1 else 0
    if len(points) < NUM_POINTS or points[2] - points[1] != step:
        raise BadInput(f"{name} was traced at {sorted(rows)}; a replay needs three evenly spaced values")
    if step % period and (points[0] - 1) // block_of(period) != (points[-1] - 1) // block_of(period):
        raise BadInput(f"{name} was traced at {sorted(rows)}, which round up differently to {period}")
    low, middle, high = (rows[point] for point in points)
    first, second = middle - low, high - 2 * middle + low
    # Three values always lie on a quadratic; one that bends down or shrinks comes from rounding.
    bent = np.flatnonzero((first < 0) | (second < 0))
    if len(bent):
        storage = min(int(bent[0]), len(base.storages) - 1)
        found = ", ".join(str(int(row[bent[0]])) for row in (low, middle, high))
        raise StructureChanges(
            f"{storage_name(base, storage)} has {found} bytes at {name}={', '.join(map(str, points))}",
            hint="trace it at the requested sizes",
        )
    return Knob(name=name, points=points, period=period, start=low, first=first, second=second, exact=exact)


def _choose_forms(replay: Replay, crosses: Sequence[Trace]) -> Replay:
    """Choose for each storage the first form that agrees with every trace that moves several knobs."""
    if not crosses:
        return replay
    forms = np.full(len(replay.num_bytes), -1, np.int8)
    for index in reversed(range(len(FORMS))):
        tried = replace(replay, forms=np.full(len(forms), index, np.int8))
        agrees = np.ones(len(forms), bool)
        for trace in crosses:
            along = {knob.name: knob.at(trace.sizes[knob.name]) for knob in replay.knobs}
            agrees &= _combine(along, tried) == _numbers_of(trace)
        forms[agrees] = index
    if (forms < 0).any():
        storage = min(int(np.flatnonzero(forms < 0)[0]), len(replay.base.storages) - 1)
        raise StructureChanges(
            f"the bytes of {storage_name(replay.base, storage)} are neither a product nor a sum of what "
            f"{', '.join(knob.name for knob in replay.knobs)} make of them",
            hint="trace it at the requested sizes",
        )
    return replace(replay, forms=forms)


def _combine(along: Mapping[str, Longs], replay: Replay) -> Longs:
    """Compute the bytes where every knob moved from those where each moved alone."""
    base, forms = replay.num_bytes, replay.forms
    if not along:
        return base.copy()
    if len(along) == 1:
        return next(iter(along.values()))
    # Doubles carry 15 digits; bytes have at most 13, so that rounding gives the exact integer.
    safe = np.where(base == 0, 1, base).astype(np.float64)
    product = base.astype(np.float64)
    total = base.copy()
    others = base.copy()
    for name, moved in along.items():
        product *= moved / safe
        total += moved - base
        others += moved - base if name != BATCH else 0
    found = np.rint(product).astype(np.int64)
    found = np.where(forms == FORMS.index("sum"), total, found)
    by_batch = forms == FORMS.index("batch times sum")
    if by_batch.any():
        scaled = np.rint(along.get(BATCH, base) / safe * others).astype(np.int64)
        found = np.where(by_batch, scaled, found)
    return found


def _refuse_difference(trace: Trace, num_bytes: Longs) -> None:
    wrong = np.flatnonzero(num_bytes != _bytes_of(trace))
    if len(wrong):
        storage = int(wrong[0])
        found = trace.storages[storage].num_bytes
        raise StructureChanges(
            f"{storage_name(trace, storage)} has {found} bytes at {show_sizes(trace.sizes)}, and "
            f"{int(num_bytes[storage])} would follow from the other traces",
            hint="trace it at the requested sizes",
        )


def compare(base: Trace, trace: Trace) -> None:
    """Raise `StructureChanges` unless both traces are the same births, and between births the same deaths.

    The order of deaths between two births is free: autocast drops its copies in the order of addresses.
    """
    if base is trace:
        return
    for index, (one, other) in enumerate(zip(base.storages, trace.storages, strict=False)):
        if _what(one) != _what(other):
            _refuse(base, trace, f"{storage_name(base, index)} is {storage_name(trace, index)}")
    counts = (len(base.storages), len(trace.storages))
    if counts[0] != counts[1]:
        more = base if counts[0] > counts[1] else trace
        _refuse(base, trace, f"{storage_name(more, min(counts))} is born in one of them only")
    if not np.array_equal(base.events, trace.events):
        _compare_events(base, trace)
    if base.marks != trace.marks:
        _refuse(base, trace, "the phases of the step begin at other events")


def _what(storage: Storage) -> tuple[str | None, ...]:
    return (storage.op, storage.module, storage.phase, storage.component)


def _compare_events(base: Trace, trace: Trace) -> None:
    one, other = _canonical(base.events), _canonical(trace.events)
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    if len(differs) or len(one) != len(other):
        position = int(differs[0]) if len(differs) else shared
        event = int((one if len(one) > position else other)[position])
        _refuse(base, trace, f"{storage_name(base, event if event >= 0 else ~event)} is freed elsewhere")


def _canonical(events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort the deaths between two births in the order of their storages."""
    births = events >= 0
    return events[np.lexsort((events, ~births, np.cumsum(births)))]


def _refuse(base: Trace, trace: Trace, difference: str) -> NoReturn:
    here, there = show_sizes(base.sizes), show_sizes(trace.sizes)
    raise StructureChanges(
        f"the step allocates differently at {there} than at {here}: {difference}",
        hint="trace it at the requested sizes",
    )


def storage_name(trace: Trace, storage: int) -> str:
    found = trace.storages[storage]
    place = f" of {found.module}" if found.module else ""
    return f"storage {storage} ({found.op}{place}, {found.phase})"


def show_sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())
