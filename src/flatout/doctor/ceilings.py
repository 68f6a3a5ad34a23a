"""From measured seconds to shares of the step and to ceilings.

A share is the part of the step that a cause holds; its ceiling is the step without that part.  Seconds
of a slowed-down pass (attribution, the profiler) are only ever divided by the step of that same pass,
and the share is then applied to the undisturbed step.  Where the job was really run without a cause,
the measured figure wins: no computed ceiling of the loader's side stands above the measured one.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.doctor.finding import Ceiling
from flatout.measure.evidence import Counterfactual, Evidence, Loader

# A cause never holds the whole step: beyond this, the two timings simply disagree.
MOST = 0.999
# A speed-up that cannot be told from none.
RESOLVABLE_SPEEDUP = 1.05
BUSY = 0.8  # of the step, a GPU that bounds it


def share_of(part_s: float | None, whole_s: float | None) -> float | None:
    """`part_s` / `whole_s`, between 0 and MOST; None when either is unknown."""
    if part_s is None or whole_s is None or whole_s <= 0:
        return None
    return min(max(part_s / whole_s, 0.0), MOST)


def computed_ceiling(evidence: Evidence, *, freed_share: float) -> Ceiling | None:
    """The step without `freed_share` of it."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    left = 1 - min(max(freed_share, 0.0), MOST)
    return Ceiling(step_s=step_s * left, speedup=1 / left, source="computed")


def measured_ceiling(counterfactual: Counterfactual) -> Ceiling:
    """The step as it ran with the cause taken away."""
    return Ceiling(
        step_s=counterfactual.step_s,
        speedup=max(counterfactual.speedup, 1.0),
        source="measured",
        speedup_low=counterfactual.speedup_low,
        speedup_high=counterfactual.speedup_high,
    )


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


def without_episode(evidence: Evidence, share: float) -> Ceiling | None:
    """The job with `share` of its time, which lies outside the step, for nothing."""
    if evidence.step_s is None:
        return None
    left = 1 - min(max(share, 0.0), MOST)
    return Ceiling(step_s=evidence.step_s, speedup=1.0, source="measured", job_speedup=1 / left)


def loading_ceiling(evidence: Evidence, *, freed_share: float) -> Ceiling | None:
    """The computed ceiling of a cause inside the loader, or the measured one of a free loader if lower."""
    computed = computed_ceiling(evidence, freed_share=freed_share)
    cached = evidence.counterfactual("cached")
    if computed is None or cached is None or computed.speedup <= cached.speedup:
        return computed
    return measured_ceiling(cached)


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
