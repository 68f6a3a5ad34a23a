"""Arms that take turns, and what becomes of one that fails: the others go on without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from interleaved import ratio

from flatout.ground.errors import FlatoutError

# Whatever an arm's libraries raise; an interrupt still ends the run.
FAILURES = (
    FlatoutError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    OSError,
)
LEAST_ROUNDS, MOST_ROUNDS = 3, 30

Arm = Callable[[], float]  # does the work and says how much it was: tokens, trials
made: list[Any] = []  # by the last arm: whoever asked for it keeps it, so letting go of it is not timed


@dataclass(slots=True)
class Timed:
    """Seconds per unit of work of one arm, round by round."""

    first_s: float | None = None  # the first call, which compiles and captures
    per_unit_s: list[float] = field(default_factory=list)
    failed: str | None = None

    @property
    def per_s(self) -> float | None:
        return 1 / statistics.median(self.per_unit_s) if self.per_unit_s else None

    def of(self, other: Timed) -> dict[str, float] | None:
        """How many times as fast as `other`, over rounds that both ran."""
        rounds = min(len(self.per_unit_s), len(other.per_unit_s))
        return ratio(other.per_unit_s[:rounds], self.per_unit_s[:rounds]) if rounds else None


def race(arms: Mapping[str, Arm], *, seconds: float, cuda: bool) -> dict[str, Timed]:
    """Rounds over all arms in turn until `seconds` are over; their first calls are not counted."""
    found = {name: Timed() for name in arms}
    for name, arm in arms.items():
        taken = _taken(arm, found[name], cuda=cuda)
        found[name].first_s = None if taken is None else taken[0]
    began = time.monotonic()
    for number in range(MOST_ROUNDS):
        names = [name for name in arms if found[name].failed is None]
        if not names or (number >= LEAST_ROUNDS and time.monotonic() - began > seconds):
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken = _taken(arms[name], found[name], cuda=cuda)
            if taken is not None:
                found[name].per_unit_s.append(taken[0] / taken[1])
    return found


def _taken(arm: Arm, timed: Timed, *, cuda: bool) -> tuple[float, float] | None:
    """(seconds, units) of one call; None if it failed."""
    clock = clock_of(cuda)
    try:
        made.clear()
        _wait(cuda)
        began = clock()
        units = arm()
        _wait(cuda)
        return clock() - began, units
    except FAILURES as error:
        timed.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None


def clock_of(cuda: bool) -> Callable[[], float]:
    """On a CPU the time it worked for this process: what others do there at the same time is left out."""
    return time.perf_counter if cuda else time.process_time


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def rows_of(
    found: Mapping[str, Timed], *, unit: str, against: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The arms as rows of a result; `against` gives an arm's rivals, each with the title of the ratio."""
    rows: list[dict[str, Any]] = []
    for name, timed in found.items():
        row: dict[str, Any] = {"arm": name, "unit": unit, "per_s": timed.per_s, "first_s": timed.first_s}
        if timed.failed is not None:
            row["failed"] = timed.failed
        for title, other in against.get(name, {}).items():
            if other in found and (share := timed.of(found[other])) is not None:
                row[title] = share
        rows.append(row)
    return rows


def show(row: Mapping[str, Any]) -> None:
    """One line."""
    if row.get("failed"):
        print(f"    {row['arm']}: failed: {row['failed']}", flush=True)
        return
    shares = "".join(
        f", {title} {one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        for title, one in row.items()
        if isinstance(one, dict) and "ratio" in one
    )
    others = "".join(
        f", {name} {value:.3g}" if isinstance(value, float) else f", {name} {value}"
        for name, value in row.items()
        if name not in ("arm", "unit", "per_s", "first_s") and not isinstance(value, dict)
    )
    speed = "" if row.get("per_s") is None else f" {row['per_s']:,.4g} {row['unit']}/s"
    first = "" if row.get("first_s") is None else f" (first call {row['first_s']:.1f} s)"
    print(f"    {row['arm']}:{speed}{shares}{others}{first}", flush=True)
