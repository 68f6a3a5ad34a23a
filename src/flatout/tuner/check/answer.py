"""Three answers, ok, slower and cannot tell, and the smallest change that could have been seen.

Runs of base and head alternate, and each pair gives the ratio of their times; the interval is Student's t
over the logarithms.  Head is *slower* when the whole interval lies above the tolerance, *ok* when it lies
below it.  Pairs are added until one of the two holds.  When the last pair leaves both open, the answer is
*cannot tell*, which is not ok: the machine is too noisy for this tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from flatout.ground.units import show_bytes, show_share
from flatout.tuner.trial.counts import Counts
from flatout.tuner.verdict import Gain

CheckVerdict = Literal["ok", "slower", "cannot tell"]
FEWEST_PAIRS = 4
COUNT_TOLERANCE = 0.01  # counts of the same source are equal, or nearly so if shapes vary


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """The time of head's step divided by base's, with its 95 % interval."""

    ratio: float
    low: float
    high: float
    num_pairs: int

    @property
    def smallest(self) -> float:
        """The smallest change, as a share of the step, that these pairs could have shown."""
        return math.sqrt(self.high / self.low) - 1 if self.num_pairs > 1 else math.inf


def slowdown_of(gain: Gain) -> Slowdown:
    """Turn how many times faster head is into how many times slower."""
    low = 1 / gain.high if gain.high else 0.0
    return Slowdown(
        ratio=1 / gain.ratio,
        low=low,
        high=1 / gain.low if gain.low else math.inf,
        num_pairs=gain.num_pairs,
    )


def judge(slowdown: Slowdown, *, tolerance: float) -> CheckVerdict:
    """Answer from the pairs so far."""
    if slowdown.num_pairs < FEWEST_PAIRS:
        return "cannot tell"
    if slowdown.low > 1 + tolerance:
        return "slower"
    return "ok" if slowdown.high < 1 + tolerance else "cannot tell"


def judge_gain(gain: Gain, *, needed: float) -> CheckVerdict:
    """Answer whether a gain still meets its requirement."""
    if gain.num_pairs < FEWEST_PAIRS:
        return "cannot tell"
    return "ok" if gain.low > needed else "slower" if gain.high < needed else "cannot tell"


def reason_of(answer: CheckVerdict, slowdown: Slowdown, *, tolerance: float) -> str:
    """State the answer in a sentence, with what it rests on."""
    takes = f"head's step takes {slowdown.ratio:.3f} of base's [{slowdown.low:.3f}, {slowdown.high:.3f}]"
    if answer == "ok":
        return f"{takes}, less than {1 + tolerance:g}"
    if answer == "slower":
        return f"{takes}, more than {1 + tolerance:g}"
    return (
        f"{takes}, and {1 + tolerance:g} lies within: {slowdown.num_pairs} pairs of runs can show changes "
        f"of {show_share(slowdown.smallest)} or more on this machine"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CountChange:
    """A count that differs."""

    name: str
    base: float
    head: float

    @property
    def grew(self) -> bool:
        return self.head > self.base

    def __str__(self) -> str:
        show = show_bytes if self.name.endswith("bytes") else "{:g}".format
        return f"{self.name.replace('_', ' ')} {show(self.base)} → {show(self.head)}"


def changes(base: Counts | None, head: Counts | None) -> tuple[CountChange, ...]:
    """Return the counts that differ by more than a hundredth; none if one side was not counted."""
    if base is None or head is None:
        return ()
    found = []
    for field in fields(Counts):
        one, other = getattr(base, field.name), getattr(head, field.name)
        if one is None or other is None:
            continue  # a GPU on one side only
        if abs(other - one) > COUNT_TOLERANCE * max(abs(one), abs(other)):
            found.append(CountChange(name=field.name, base=one, head=other))
    return tuple(found)


def grown(found: Sequence[CountChange]) -> list[str]:
    """Describe the counts that grew."""
    return [str(each) for each in found if each.grew]
