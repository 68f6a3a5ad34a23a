"""From arms to ceilings: what the step took with a cause gone, measured or not shown.

An arm ran some steps differently, interleaved with ordinary ones.  A rule names the kinds of arms that prove
it; the first of them that ran at its line decides.  An arm that makes a block vanish is a bound, since a fix
keeps some of the work: what the device needs at its best for the block's arithmetic and bytes is added to the
step.  Where the arm shows no gain the cause costs nothing, and there is no finding; where none could run,
the finding has its share of the step and the reason.

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
# The lower end of an interval that proves a gain.
PROVEN_SPEEDUP = 1.03
KNOCKED_OUT = "knock-out"
MOST_CALL_LINES = 4  # of a statement that is a call and little else
OF_LINES = (KNOCKED_OUT, "batched-call", "library-recurrence", "no-grad")  # arms that change some lines alone
LEAVE_OUT = (KNOCKED_OUT, "cached")  # arms that only take work away
IMPLAUSIBLE = 0.9  # the speed-up of a step that does less: other jobs took the core meanwhile
BUSY = 0.8  # of the step, a GPU that bounds it


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmProof:
    """What the arms say of a cause: a ceiling, that it costs nothing, or why neither is known."""

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
    """The first of `kinds` that ran at `place` decides; it frees at most `observed_share` of the step.

    Where its interval leaves a gain open and a later one proves it, it refutes nothing; nor does one whose
    steps took much longer though they did less.
    """
    for number, kind in enumerate(kinds, start=1):
        found = arm_at(evidence, kind, place)
        if found is not None:
            ceiling = _capped(ceiling_of(found, evidence), observed_share)
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
    return replace(
        ceiling,
        step_s=ceiling.step_s * ceiling.speedup / most,
        speedup=most,
        speedup_low=None if ceiling.speedup_low is None else min(ceiling.speedup_low, most),
        speedup_high=most,
    )


def _noise(ceiling: Ceiling) -> str:
    interval = f"{show_ratio(ceiling.speedup_low)} to {show_ratio(ceiling.speedup_high)}"
    return f"{ceiling.arm}: {show_ratio(ceiling.speedup)} ({interval}), within the noise of this run"


def shows_no_gain(ceiling: Ceiling) -> bool:
    high = ceiling.speedup_high if ceiling.speedup_high is not None else ceiling.speedup
    return ceiling.speedup <= 1 or high < RESOLVABLE_SPEEDUP


def is_proven(ceiling: Ceiling | None) -> bool:
    """Whether a gain was measured beyond doubt."""
    if ceiling is None:
        return False
    low = ceiling.speedup_low if ceiling.speedup_low is not None else ceiling.speedup
    return low > PROVEN_SPEEDUP


def ceiling_of(found: Counterfactual, evidence: Evidence) -> Ceiling:
    """The step as it ran under an arm, with what a fix must keep of what the arm left out."""
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
    """What the step takes under an arm, beside the real one: "0.20 s instead of 0.40 s: 2.0x"."""
    return (
        f"{show_seconds(found.step_s)} instead of {show_seconds(found.baseline_step_s)}: "
        f"{show_ratio(found.speedup)}"
    )


def loading_s(found: Counterfactual, evidence: Evidence) -> float:
    """What the loader takes of a real step, which an arm on batches that were kept leaves as it is."""
    cached = evidence.counterfactual("cached")
    if found.baseline != "cached" or found.kind == "half" or loading_costs_nothing(evidence):
        return 0.0  # steps on one batch carry what real ones wait already
    if cached is None or cached.speedup_low <= 1:  # not resolved: what a step was seen to wait
        return evidence.phase_s("wait") or 0.0
    return max(0.0, cached.baseline_step_s - cached.step_s)


def arm_at(evidence: Evidence, kind: str, place: Place | None) -> Counterfactual | None:
    """The arm of a kind at a place: that of the fewest lines, then the fastest.

    A line in a loop is meant with its loop, which a fix takes away: what one pass of it costs alone is less.
    """
    held = [found for found in evidence.counterfactuals if found.kind == kind and concerns(found, place)]
    header = _innermost_loop(evidence, place) if kind in OF_LINES else None
    if not held and kind == KNOCKED_OUT and place is not None:
        held = _at_the_call(evidence, place)
    with_loop = [found for found in held if header is not None and holds(found, header)]
    return min(with_loop or held, key=lambda found: (num_lines(found), -found.speedup), default=None)


def _at_the_call(evidence: Evidence, place: Place) -> list[Counterfactual]:
    """Arms without the statement that calls the function of a place: the function is gone with it."""
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
    """The first line of the loop around a place; None where there is none, or none was seen."""
    if place is None or evidence.stacks is None:
        return None
    headers = evidence.stacks.loops.get(str(place), ())
    return replace(place, line=headers[-1]) if headers else None


def concerns(found: Counterfactual, place: Place | None) -> bool:
    return found.kind not in OF_LINES or (place is not None and holds(found, place))


def holds(found: Counterfactual, place: Place) -> bool:
    """Whether a line is in the block that an arm leaves out."""
    if found.place is None or found.place.file != place.file:
        return False
    return found.place.line <= place.line <= (found.last_line or found.place.line)


def num_lines(found: Counterfactual) -> int:
    """How many lines an arm is about; one that is about the whole step comes last."""
    if found.place is None:
        return 1_000_000
    return (found.last_line or found.place.line) - found.place.line + 1


def _why_not(evidence: Evidence, kinds: tuple[str, ...], place: Place | None) -> str:
    """Why no arm of these kinds ran at a place."""
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
    """`part_s` / `whole_s`, between 0 and MOST; None when either is unknown."""
    if part_s is None or whole_s is None or whole_s <= 0:
        return None
    return min(max(part_s / whole_s, 0.0), MOST)


def step_share(evidence: Evidence) -> float | None:
    """The part of the job's time, after its set-up, that typical steps hold."""
    return evidence.job_share(evidence.step_s or 0.0)


def job_speedup(evidence: Evidence, speedup: float) -> float | None:
    """What a step `speedup` times as fast does for the job (Amdahl's law); None where it is unknown."""
    share = step_share(evidence)
    return None if share is None or speedup <= 0 else 1 / (1 - share + share / speedup)


def for_the_job(evidence: Evidence, ceiling: Ceiling) -> Ceiling:
    """A ceiling of the step with what it means for the job."""
    if ceiling.job_speedup is not None:
        return ceiling
    return replace(ceiling, job_speedup=job_speedup(evidence, ceiling.speedup))


def episode_share(evidence: Evidence, episode: Episode) -> float | None:
    """The part of the job's time that an episode takes; of the observed time where it was seen once."""
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
    """Whether steps on cached batches were measured to be no faster."""
    cached = evidence.counterfactual("cached")
    return cached is not None and cached.speedup_high < RESOLVABLE_SPEEDUP


def rows_cost_nothing(evidence: Evidence) -> bool:
    """Whether half the batch was measured to take as long: launches, not arithmetic, fill the step."""
    half = evidence.counterfactual("half")
    return half is not None and half.speedup_high < RESOLVABLE_SPEEDUP


def wait_share(evidence: Evidence, loader: Loader) -> float | None:
    """The share of the step spent waiting for this loader's batches."""
    training = [other for other in evidence.loaders if other.trains]
    if len(training) <= 1 or loader.wait_s is None:
        return share_of(evidence.phase_s("wait"), evidence.step_s)
    return share_of(loader.wait_s.mean_s, evidence.step_s)


def batches_per_step(evidence: Evidence) -> float:
    """Batches one step consumes: more than one under gradient accumulation."""
    steps = evidence.kept("real") or evidence.kept("warmup")
    taken = sum(step.num_batches for step in steps)
    return taken / len(steps) if taken else 1.0


def counted_step_s(evidence: Evidence) -> float | None:
    """The mean step while calls were counted, which slows it; the ordinary step when none was."""
    counted = [step.step_s for step in evidence.steps if step.arm == "count"]
    return sum(counted) / len(counted) if counted else evidence.step_s


def rows_per_step(evidence: Evidence) -> float | None:
    """Samples of the batch, where every step knows them."""
    rows = [step.rows for step in evidence.kept("real") or evidence.kept("warmup")]
    known = [number for number in rows if number is not None]
    return sum(known) / len(known) if known and len(known) == len(rows) else None


def on_gpu(evidence: Evidence) -> bool:
    return evidence.job.device == "cuda"


def host_is_hidden(evidence: Evidence) -> bool:
    """Whether the GPU works nearly all of the time: what the host does meanwhile costs nothing."""
    busy = evidence.kernels.busy_share if evidence.kernels is not None else None
    return busy is not None and busy >= BUSY
