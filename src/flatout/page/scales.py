"""From values to places on an axis, and the round numbers written beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flatout.ground.units import show_time

Show = Callable[[float], str]
MOST_TICKS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """An axis from `low` to `high` with its ticks; beyond `bend` from 0 it is logarithmic."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    bend: float | None = None

    def share(self, value: float) -> float:
        """Return how far along the axis a value lies, from 0 to 1; beyond an end, that end."""
        low, high, value = map(self._bent, (self.low, self.high, value))
        # Halves, so that the distance of two huge numbers stays finite.
        return min(max((value / 2 - low / 2) / (high / 2 - low / 2), 0.0), 1.0) if high > low else 0.0

    def _bent(self, value: float) -> float:
        return value if self.bend is None else math.asinh(value / self.bend)


def zero_scale(top: float, show: Show, *, unit: float = 1.0) -> Scale:
    """Make a scale from 0 to `top` with round ticks; for bytes, `unit` is their unit (`binary_unit`)."""
    high = top if top > 0 else unit
    return Scale(low=0.0, high=high, ticks=_shown((t * unit for t in round_ticks(high / unit)), show))


def span_scale(low: float, high: float, show: Show | None = None) -> Scale:
    """Make a scale from `low` to `high`, marked at both ends and half-way, where equal values lie."""
    if high - low <= 1e-9 * max(1.0, abs(high)):
        around = max(0.5, 0.1 * abs(high))
        low, high = low - around, high + around
    return Scale(
        low=low,
        high=high,
        ticks=_shown((low, low / 2 + high / 2, high), show or (lambda level: show_level(level, high - low))),
    )


def round_scale(low: float, high: float, show: Show = "{:g}".format) -> Scale:
    """Make a scale between round numbers that hold the range, with a tick at each."""
    if high - low <= 1e-6 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    step = round_step((high - low) / (MOST_TICKS - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(number * step, 12) for number in range(first, last + 1)]
    return Scale(low=ticks[0], high=ticks[-1], ticks=_shown(ticks, show))


def time_scale(span_s: float) -> Scale:
    """Make a scale of the time of a run, marked at its ends and quarters."""
    return Scale(
        low=0.0,
        high=max(span_s, 1e-9),
        ticks=_shown((span_s * quarter / 4 for quarter in range(5)), show_time),
    )


def step_scale(first: int, last: int, *, unit: str = "steps") -> Scale:
    """Make a scale of counted steps, marked at both ends."""
    return Scale(low=first, high=last, ticks=((first, f"{first:,}"), (last, f"{last:,} {unit}")))


def log_scale(low: float, high: float, *, bend: float) -> Scale:
    """Make a scale of powers of ten; below `bend` on either side of 0 it is linear."""
    low, high = min(low, 0.0), max(high, bend)
    first, last = round(math.log10(bend)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first) / 4))
    ticks = [0.0, *reversed([10.0**power for power in range(last, first - 1, -every)])]
    return Scale(low=low, high=high, bend=bend, ticks=_shown(ticks, "{:g}".format))


def _shown(values: Iterable[float], show: Show) -> tuple[tuple[float, str], ...]:
    return tuple((value, show(value)) for value in values)


def round_ticks(top: float) -> list[float]:
    """Return zero and two to five round numbers up to `top`."""
    size = 10.0 ** math.floor(math.log10(top))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2) if top / (size * factor) <= 5.5)
    return [step * i for i in range(math.floor(top / step) + 1)]


def round_step(wanted: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is no smaller than `wanted`."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def binary_unit(num_bytes: float) -> float:
    """Return the bytes of the unit that a number is shown in: 1, KiB, MiB, GiB."""
    return 1024.0 ** math.floor(math.log(max(num_bytes, 1.0), 1024))


def show_level(level: float, span: float) -> str:
    """Show a level with enough digits to tell the ticks of an axis of this span apart."""
    if abs(level) < 1e-12:
        return "0"
    if abs(level) + span < 1e-3 or abs(level) >= 1e5:
        return f"{level:.1e}"
    return f"{level:.{min(max(1 - math.floor(math.log10(span)), 0), 5)}f}"


def show_value(value: float) -> str:
    """Show a value: 61.5, 1.23, 0.0466, 1e-04."""
    size = abs(value)
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}" if size >= 1e-3 or size < 1e-12 else f"{value:.0e}"
