"""Turn arms into ceilings: what the step took without a cause, measured or not shown.

An arm ran some steps differently, interleaved with ordinary ones.  A rule names the kinds of arms that prove
it; the first of them that ran at its line decides.  An arm that removes a block gives a bound, since a fix
keeps some of the work: the least time that the device needs for the block's arithmetic and bytes is added to
the step.  If the arm shows no gain, the cause costs nothing and there is no finding; if no arm could run, the
finding has its share of the step and the reason.

Seconds of a slowed-down pass (attribution, the profiler) are only ever divided by the step of that same pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatout.doctor.finding import Ceiling
from flatout.ground.units import show_ratio, show_seconds
from flatout.measure.evidence import Counterfactual, Episode, Evidence, Loader, Place

# A cause never holds the whole step: beyond this, the two timings simply disagree.
MOST = 0.999
# A speed-up that cannot be told from none.
RESOLVABLE_SPEEDUP = 1.05
LITTLE = 1.2  # times the speed
# The lower end of an interval that proves a gain.
PROVEN_SPEEDUP = 1.03
KNOCKED_OUT = "knock-out"
MOST_CALL_LINES = 4  # of a statement that is little more than a call
OF_LINES = (KNOCKED_OUT, "batched-call", "library-recurrence", "no-grad")  # arms that change only some lines
LEAVE_OUT = (KNOCKED_OUT, "cached")  # arms that only remove work
IMPLAUSIBLE = 0.9  # the speed-up of a step that does less: other jobs took the core meanwhile
BUSY = 0.8  # of the step: a GPU this busy bounds it


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmProof:
    """What the arms show about a cause: a ceiling, that it costs nothing, or why neither is known."""

    ceiling: Ceiling | None = None
    refuted: bool = False
    reason: str | None = None


def prove(
    evidence: Evidence,
    kinds: tuple[str, ...],
    *,
    place: Place | None = None,
    observed_share: float | None = None,
) -> ArmProof:
    """Decide by the first of `kinds` that ran at `place`; it can free at most `observed_share` of the step.

    An arm refutes nothing if its interval leaves a gain open and a later arm proves it, or if its steps took
    much longer although they did less.  An arm that does the same as the fix leaves no small gain open.
    """
    for number, kind in enumerate(kinds, start=1):
        found = arm_at(evidence, kind, place)
        if found is not None:
            ceiling = _capped(ceiling_of(found, evidence), observed_share)
            if kind not in LEAVE_OUT and _gains_little(ceiling):
                return ArmProof(refuted=True)
            if shows_no_gain(ceiling):
                is_open = (ceiling.speedup_high or 0.0) >= RESOLVABLE_SPEEDUP
                is_proven_later = any(_proves(evidence, later, place) for later in kinds[number:])
                is_odd = kind in LEAVE_OUT and found.speedup < IMPLAUSIBLE
                if is_odd or (is_open and is_proven_later):
                    return ArmProof(reason=_noise(ceiling))
                return ArmProof(refuted=True)
            if ceiling.speedup_low is not None and ceiling.speedup_low <= 1:
                return ArmProof(reason=_noise(ceiling))
            return ArmProof(ceiling=ceiling)
    return ArmProof(reason=_why_not(evidence, kinds, place))


def _proves(evidence: Evidence, kind: str, place: Place | None) -> bool:
    found = arm_at(evidence, kind, place)
    return found is not None and is_proven(ceiling_of(found, evidence))


def _capped(ceiling: Ceiling, observed_share: float | None) -> Ceiling:
    if observed_share is None:
        return ceiling
    most = 1 / (1 - min(observed_share, MOST))
    if ceiling.speedup <= most:
        return ceiling
    in_interval = ceiling.speedup_low is not None and ceiling.speedup_low < most
    return replace(
        ceiling,
        step_s=ceiling.step_s * ceiling.speedup / most,
        speedup=most,
        speedup_low=ceiling.speedup_low if in_interval else None,
        speedup_high=most if in_interval else None,
        is_capped=True,
    )


def _noise(ceiling: Ceiling) -> str:
    interval = f"{show_ratio(ceiling.speedup_low)} to {show_ratio(ceiling.speedup_high)}"
    return f"{ceiling.arm}: {show_ratio(ceiling.speedup)} ({interval}), within the noise of this run"


def _gains_little(ceiling: Ceiling) -> bool:
    """Return whether an arm may have gained nothing, and little at most."""
    if ceiling.speedup_low is None or ceiling.speedup_high is None:
        return False
    return ceiling.speedup_low <= 1 and ceiling.speedup_high < LITTLE


def shows_no_gain(ceiling: Ceiling) -> bool:
    high = ceiling.speedup_high if ceiling.speedup_high is not None else ceiling.speedup
    return ceiling.speedup <= 1 or high < RESOLVABLE_SPEEDUP


def is_proven(ceiling: Ceiling | None) -> bool:
    """Return whether a gain was measured beyond doubt."""
    if ceiling is None:
        return False
    low = ceiling.speedup_low if ceiling.speedup_low is not None else ceiling.speedup
    return low > PROVEN_SPEEDUP


def ceiling_of(found: Counterfactual, evidence: Evidence) -> Ceiling:
    """Return the step under an arm, plus the work that a fix must keep."""
    apart_s = loading_s(found, evidence)
    kept_s = (found.roofline_s or 0.0) + apart_s

    def with_kept(speedup: float) -> float:
        without_s = found.baseline_step_s / speedup + kept_s if speedup > 0 else 0.0
        return (found.baseline_step_s + apart_s) / without_s if without_s > 0 else 0.0

    speedup = with_kept(found.speedup)
    return Ceiling(
        # of the job's own step: an arm may run on one batch, whose step is longer or shorter
        step_s=(evidence.step_s or found.baseline_step_s) / speedup if speedup > 0 else found.step_s,
        speedup=speedup,
        speedup_low=with_kept(found.speedup_low),
        speedup_high=with_kept(found.speedup_high),
        kind=found.kind,
        arm=found.label,
    )


def beside(found: Counterfactual) -> str:
    """Compare the step under an arm with the real one: "0.20 s instead of 0.40 s: 2.0x"."""
    return (
        f"{show_seconds(found.step_s)} instead of {show_seconds(found.baseline_step_s)}: "
        f"{show_ratio(found.speedup)}"
    )


def loading_s(found: Counterfactual, evidence: Evidence) -> float:
    """Return the loader's time in a real step, which an arm on kept batches does not change."""
    cached = evidence.counterfactual("cached")
    if found.baseline != "cached" or found.kind == "half" or loading_costs_nothing(evidence):
        return 0.0  # steps on one batch already include the wait of real ones
    if cached is None or cached.speedup_low <= 1:  # not resolved: use the observed wait
        return evidence.phase_s("wait") or 0.0
    return max(0.0, cached.baseline_step_s - cached.step_s)


def arm_at(evidence: Evidence, kind: str, place: Place | None) -> Counterfactual | None:
    """Return the arm of a kind at a place: the one with the fewest lines, then the fastest.

    A line in a loop stands for its loop, which a fix removes: a single iteration costs less.  If no arm on
    its lines could tell, one on the call of its function stands for them.
    """
    held = [found for found in evidence.counterfactuals if found.kind == kind and concerns(found, place)]
    header = _innermost_loop(evidence, place) if kind in OF_LINES else None
    if kind == KNOCKED_OUT and place is not None and not any(map(_tells, held)):
        calls = _at_the_call(evidence, place)
        held = [found for found in calls if _tells(found)] or held or calls
    with_loop = [found for found in held if header is not None and holds(found, header)]
    return min(with_loop or held, key=lambda found: (num_lines(found), -found.speedup), default=None)


def _tells(found: Counterfactual) -> bool:
    """Return whether an arm shows a gain, or that there is none."""
    return found.speedup_low > 1 or found.speedup_high < RESOLVABLE_SPEEDUP


def _at_the_call(evidence: Evidence, place: Place) -> list[Counterfactual]:
    """Return arms without the statement that calls a place's function, which removes the function too."""
    paths = evidence.stacks.paths if evidence.stacks is not None else ()
    callers = set()
    for path in paths:
        functions = [(each.file, each.function) for each in path.places]
        if (place.file, place.function) in functions[1:]:
            callers.add(path.places[functions.index((place.file, place.function)) - 1])
    return [
        found
        for found in evidence.counterfactuals
        if found.kind == KNOCKED_OUT
        and num_lines(found) <= MOST_CALL_LINES
        and any(holds(found, caller) for caller in callers)
    ]


def _innermost_loop(evidence: Evidence, place: Place | None) -> Place | None:
    """Return the first line of the loop around a place, or None if none was seen."""
    if place is None or evidence.stacks is None:
        return None
    headers = evidence.stacks.loops.get(str(place), ())
    return replace(place, line=headers[-1]) if headers else None


def concerns(found: Counterfactual, place: Place | None) -> bool:
    return found.kind not in OF_LINES or (place is not None and holds(found, place))


def holds(found: Counterfactual, place: Place) -> bool:
    """Return whether a line is in the block that an arm removes."""
    if found.place is None or found.place.file != place.file:
        return False
    return found.place.line <= place.line <= (found.last_line or found.place.line)


def num_lines(found: Counterfactual) -> int:
    """Return how many lines an arm changes; an arm on the whole step sorts last."""
    if found.place is None:
        return 1_000_000
    return (found.last_line or found.place.line) - found.place.line + 1


def _why_not(evidence: Evidence, kinds: tuple[str, ...], place: Place | None) -> str:
    """Return why no arm of these kinds ran at a place."""
    for left_out in evidence.arms_not_run:
        here = left_out.place is None or place is None or left_out.place.file == place.file
        if left_out.kind in kinds and here and _covers(left_out.place, left_out.last_line, place):
            return f"{left_out.label}: {left_out.reason}"
    return f"no arm ({' or '.join(kinds)}) could run here"


def _covers(first: Place | None, last_line: int | None, place: Place | None) -> bool:
    if first is None or place is None:
        return True
    return first.line <= place.line <= (last_line or first.line)


def share_of(part_s: float | None, whole_s: float | None) -> float | None:
    """Return `part_s` / `whole_s`, between 0 and MOST; None if either is unknown."""
    if part_s is None or whole_s is None or whole_s <= 0:
        return None
    return min(max(part_s / whole_s, 0.0), MOST)


def step_share(evidence: Evidence) -> float | None:
    """Return the share of the job's time after set-up that typical steps hold."""
    return evidence.job_share(evidence.step_s or 0.0)


def job_speedup(evidence: Evidence, speedup: float) -> float | None:
    """Return the job's speed-up if a step gets `speedup` times as fast (Amdahl's law); None if unknown."""
    share = step_share(evidence)
    return None if share is None or speedup <= 0 else 1 / (1 - share + share / speedup)


def for_the_job(evidence: Evidence, ceiling: Ceiling) -> Ceiling:
    """Add what a ceiling of the step means for the job."""
    if ceiling.job_speedup is not None:
        return ceiling
    return replace(ceiling, job_speedup=job_speedup(evidence, ceiling.speedup))


def episode_share(evidence: Evidence, episode: Episode) -> float | None:
    """Return the share of the job's time that an episode takes; of the observed time if it was seen once."""
    if episode.per_step_s is not None:
        return share_of(evidence.job_share(episode.per_step_s), 1.0)
    if not episode.num_steps or evidence.step_s is None:
        return None
    once_s = episode.seconds / episode.num_steps
    return share_of(once_s, evidence.step_s + evidence.outside_s + once_s)


def without_episode(evidence: Evidence, share: float) -> Ceiling | None:
    """Return the ceiling of a job if `share` of its time, outside the step, cost nothing."""
    if evidence.step_s is None:
        return None
    left = 1 - min(max(share, 0.0), MOST)
    return Ceiling(step_s=evidence.step_s, speedup=1.0, kind="outside", job_speedup=1 / left)


def loading_costs_nothing(evidence: Evidence) -> bool:
    """Return whether steps on cached batches were measured to be no faster."""
    cached = evidence.counterfactual("cached")
    return cached is not None and cached.speedup_high < RESOLVABLE_SPEEDUP


def rows_cost_nothing(evidence: Evidence) -> bool:
    """Return whether half the batch took as long: launches, not arithmetic, fill the step."""
    half = evidence.counterfactual("half")
    return half is not None and half.speedup_high < RESOLVABLE_SPEEDUP


def wait_share(evidence: Evidence, loader: Loader) -> float | None:
    """Return the share of the step spent waiting for this loader's batches."""
    training = [other for other in evidence.loaders if other.trains]
    if len(training) <= 1 or loader.wait_s is None:
        return share_of(evidence.phase_s("wait"), evidence.step_s)
    return share_of(loader.wait_s.mean_s, evidence.step_s)


def batches_per_step(evidence: Evidence) -> float:
    """Return the batches that one step consumes: more than one under gradient accumulation."""
    steps = evidence.kept("real") or evidence.kept("warmup")
    taken = sum(step.num_batches for step in steps)
    return taken / len(steps) if taken else 1.0


def counted_step_s(evidence: Evidence) -> float | None:
    """Return the mean step while calls were counted, which slows it; else the ordinary step."""
    counted = [step.step_s for step in evidence.steps if step.arm == "count"]
    return sum(counted) / len(counted) if counted else evidence.step_s


def rows_per_step(evidence: Evidence) -> float | None:
    """Return the samples of the batch, if every step knows them."""
    rows = [step.rows for step in evidence.kept("real") or evidence.kept("warmup")]
    known = [number for number in rows if number is not None]
    return sum(known) / len(known) if known and len(known) == len(rows) else None


def on_gpu(evidence: Evidence) -> bool:
    return evidence.job.device == "cuda"


def host_is_hidden(evidence: Evidence) -> bool:
    """Return whether the GPU is busy nearly all the time, so that the host's work is hidden."""
    busy = evidence.kernels.busy_share if evidence.kernels is not None else None
    return busy is not None and busy >= BUSY
