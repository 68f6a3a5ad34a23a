"""How far, how fast and about how long: three figures of work that is counted.

The rate is that since the first count, so that what was loaded before it, or done by an earlier call, is no
part of it; until a second count there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flatout.units import show_rough, show_seconds


class Pace:
    """Counts things of one kind, named in the plural."""

    def __init__(self, noun: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._noun, self._clock = noun, clock
        self._first: tuple[int, float] | None = None

    def parts(self, done: int, total: int | None) -> list[str]:
        """So many of so many, the rate, and about how long the rest takes, as far as they are known."""
        said = [f"{done} {self._noun}" if total is None else f"{done} of {total} {self._noun}"]
        rate = self._rate(done)
        if rate is not None:
            one = self._noun.removesuffix("s")
            fast = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
            said.append(f"{fast} {self._noun}/s" if rate >= 1 else f"{show_seconds(1 / rate)} per {one}")
            if total is not None and done < total:
                said.append(f"about {show_rough((total - done) / rate)} left")
        return said

    def _rate(self, done: int) -> float | None:
        now_s = self._clock()
        if self._first is None:
            self._first = done, now_s
        before, began_s = self._first
        return (done - before) / (now_s - began_s) if done > before and now_s > began_s else None
