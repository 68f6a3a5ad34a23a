"""A Finding: what a rule concluded from Evidence, with its proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flatout.measure.evidence import Evidence, Place

FixSafety = Literal["exact", "reordered", "lossy"]
SAFETIES: tuple[FixSafety, ...] = get_args(FixSafety)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """What was measured without this cause; a number that nothing measured is not a ceiling."""

    step_s: float  # of such a step, including the work that a fix must keep
    speedup: float
    source: Literal["measured"] = "measured"
    speedup_low: float | None = None  # 95 % interval; None if one figure was read off the run
    speedup_high: float | None = None
    kind: str | None = None  # of the arm that measured it: "knock-out", "cached", "autocast"
    arm: str | None = None  # its label in the evidence
    job_speedup: float | None = None  # of the whole job after set-up; None: the same as the step's
    is_capped: bool = False  # the arm gained more than the time that was observed, which stands here


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Another rule or line that the same arm proves: one cause, seen twice."""

    code: str
    name: str
    place: Place | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause at one place."""

    code: str
    name: str
    place: Place | None
    message: str  # one sentence: what happens here, with its numbers
    evidence: tuple[str, ...]  # the figures it rests on, one line each
    share: float | None  # of the step, or of the job for a cause outside it; None if the cost is not time
    ceiling: Ceiling | None
    fix: str  # one sentence: what to do
    safety: FixSafety
    no_ceiling: str | None = None  # why there is none, if the cost is time
    also: tuple[Sight, ...] = ()
    tune: tuple[str, ...] = ()  # treatments and patches with which `flatout tune` tries the fix


def by_argument(
    evidence: Evidence, fix: str, *, transformers: str | None = None, lightning: str | None = None
) -> str:
    """Return `fix`, or the argument that does the same if a framework's loop takes the steps.

    Such a job has no line of torch to edit.
    """
    arguments = {"transformers": transformers, "lightning": lightning}
    argument = arguments.get(evidence.job.framework or "")
    return fix if argument is None else f"pass {argument}"
