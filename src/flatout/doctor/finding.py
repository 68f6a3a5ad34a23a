"""A Finding: what a rule concluded from Evidence, with its proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.measure.evidence import Place

CeilingSource = Literal["measured", "computed"]
FixSafety = Literal["exact", "reordered", "lossy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """The step if this cause were gone."""

    step_s: float
    speedup: float
    source: CeilingSource
    speedup_low: float | None = None  # 95 % interval where it was measured
    speedup_high: float | None = None
    job_speedup: float | None = None  # of the whole job after its set-up; None: as the step's


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause at one place."""

    code: str
    name: str
    place: Place | None
    message: str  # one sentence: what happens here, with its numbers
    evidence: tuple[str, ...]  # the figures it rests on, one line each
    share: float | None  # of the step, of the job for a cause outside it; None where the cost is not time
    ceiling: Ceiling | None
    fix: str  # one sentence: what to do
    safety: FixSafety
