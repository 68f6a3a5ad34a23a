"""The figures of a whole run: what its steps took, where their time went, memory, power and energy.

Step time is the time of all steps over their number, not a mean of means; energy is the difference of the
driver's counter at both ends.  Memory is the peak.  Anything nobody measured is None.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.ground.codec import encode
from flatout.ground.runs import CHANNEL_FILE, show_state
from flatout.ground.units import show_time
from flatout.monitor.job.channel import read_channel
from flatout.monitor.past.outline import RunOutline, Stretch
from flatout.monitor.sample import GpuSample, JobSample, Sample, merge, show_loss
from flatout.monitor.verdicts.window import Verdict

SUMMARY_FORMAT = "flatout-run-summary"
# Fields of a Summary -> of a JobSample and of a GpuSample, merged over the run.
OF_JOB = {
    **{
        name: name for name in ("steps", "samples", "steps_per_s", "samples_per_s", "phases", "device_phases")
    },
    "last_loss": "loss",
    "peak_allocated_bytes": "peak_allocated_bytes",
    "peak_reserved_bytes": "reserved_bytes",
}
OF_GPU = {
    "gpu_name": "name",
    "utilisation_share": "utilisation_share",
    "sm_active_share": "sm_active_share",
    "device_memory_bytes": "memory_used_bytes",
    "device_memory_total_bytes": "memory_total_bytes",
    "power_w": "power_w",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundShare:
    """One bound, and the share of the run for which it held."""

    bound: str
    share: float
    sentence: str  # said of a typical stretch of it
    action: str
    rules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One run in figures."""

    name: str
    folder: str
    command: tuple[str, ...]
    state: str
    ending: str  # the state in words, with the reason of a failure
    exit_code: int | None
    started_s: float
    duration_s: float
    gpu_name: str | None = None
    steps: int | None = None
    samples: int | None = None
    step_s: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    phases: dict[str, float] | None = None
    device_phases: dict[str, float] | None = None
    last_loss: float | None = None
    loss_lost_s: float | None = None  # after how many seconds it became NaN or infinite, to the end
    last_finite_loss: float | None = None
    utilisation_share: float | None = None
    sm_active_share: float | None = None
    device_memory_bytes: int | None = None  # the most that was in use on the job's GPU, by anybody
    device_memory_total_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    host_memory_bytes: int | None = None
    host_memory_total_bytes: int | None = None  # what a run may use: the machine's, or its container's
    cpu_share: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    energy_per_step_j: float | None = None
    energy_per_sample_j: float | None = None
    bounds: tuple[BoundShare, ...] = ()  # the largest share first

    def to_json(self) -> dict[str, Any]:
        return {"format": SUMMARY_FORMAT, "version": 1, **encode(self)}


def summarise(recorded: RunOutline) -> Summary:
    whole = merge(recorded.points)
    job = None if whole.job is None else _to_its_end(whole.job, recorded.folder)
    gpu = job_gpu(whole)
    energy_j = energy_of_job(recorded.points)
    lost_s, last_finite = lost_loss(recorded.points, None if job is None else job.loss)
    run = recorded.run
    return Summary(
        name=run.name,
        folder=recorded.folder.name,
        command=run.command,
        state=recorded.state,
        ending=show_state(run),
        exit_code=run.exit_code,
        started_s=run.started_s,
        duration_s=recorded.duration_s if run.ended_s is None else run.ended_s - run.started_s,
        step_s=mean_step_s(recorded.points),
        host_memory_bytes=whole.host.memory_used_bytes,
        host_memory_total_bytes=whole.host.memory_total_bytes,
        cpu_share=whole.host.cpu_share,
        energy_j=energy_j,
        energy_per_step_j=_over(energy_j, total(recorded.points, lambda job: job.steps)),
        energy_per_sample_j=_over(energy_j, total(recorded.points, lambda job: job.samples)),
        loss_lost_s=lost_s,
        last_finite_loss=last_finite,
        bounds=bound_shares(recorded),
        **{ours: getattr(job, name) for ours, name in OF_JOB.items() if job is not None},
        **{ours: getattr(gpu, name) for ours, name in OF_GPU.items() if gpu is not None},
    )


def _to_its_end(job: JobSample, folder: Path) -> JobSample:
    """Add the steps after the last sample, which only the channel has."""
    last = read_channel(folder / CHANNEL_FILE)
    if last is None or not last.steps:
        return job
    loss = job.loss if last.loss is None else last.loss
    return replace(job, steps=last.steps, samples=last.samples, loss=loss)


def job_gpu(sample: Sample) -> GpuSample | None:
    """Return the GPU the job computes on, or the first GPU if there is no job."""
    if sample.job is None:
        return sample.gpus[0] if sample.gpus else None
    return sample.job_gpu


def job_figure(name: str) -> Callable[[Sample], float | None]:
    """Make a function that reads one figure of the job."""
    return lambda point: None if point.job is None else getattr(point.job, name)


def gpu_figure(name: str) -> Callable[[Sample], float | None]:
    """Make a function that reads one figure of the job's GPU."""
    return lambda point: None if (gpu := job_gpu(point)) is None else getattr(gpu, name)


def weights(points: Sequence[Sample]) -> Iterator[tuple[Sample, int]]:
    """Yield each point with the number of steps that ended in it, if that is known."""
    known = [point for point in points if point.job is not None and point.job.steps is not None]
    for before, point in itertools.pairwise(known):
        assert before.job is not None and point.job is not None
        steps = (point.job.steps or 0) - (before.job.steps or 0)
        if steps > 0:  # a count that fell was begun again
            yield point, steps


def mean_step_s(points: Sequence[Sample]) -> float | None:
    timed = [(point.job.step_s, n) for point, n in weights(points) if point.job and point.job.step_s]
    if not timed:
        # One point holds the whole run.
        return next((point.job.step_s for point in points if point.job and point.job.step_s), None)
    return sum(step_s * n for step_s, n in timed) / sum(n for _, n in timed)


def total(points: Sequence[Sample], counter: Callable[[Any], int | None]) -> int | None:
    """Return how far a counter of the job went from the first point to the last."""
    values = [
        value for point in points if point.job is not None and (value := counter(point.job)) is not None
    ]
    return values[-1] - values[0] if len(values) > 1 and values[-1] > values[0] else None


def energy_of_job(points: Sequence[Sample]) -> float | None:
    """Add up the joules of the job's GPU; a counter that fell adds nothing."""
    counted = [gpu.energy_j for point in points if (gpu := job_gpu(point)) is not None]
    values = [value for value in counted if value is not None]
    if len(values) < 2:
        return None
    spent_j = sum(max(after - before, 0.0) for before, after in itertools.pairwise(values))
    return spent_j or None


def lost_loss(points: Sequence[Sample], last: float | None) -> tuple[float | None, float | None]:
    """Return after how many seconds the loss was lost for good, if it was, and its last finite value.

    `last` is the loss at the very end, which may be later than the last point.
    """
    known = [
        (point.time_s, point.job) for point in points if point.job is not None and point.job.loss is not None
    ]
    finite = [(time_s, job.loss) for time_s, job in known if not job.has_bad_loss]
    last_finite = finite[-1][1] if finite else None
    if last is None or math.isfinite(last):
        return None, last_finite
    lost = [time_s for time_s, _ in known if not finite or time_s > finite[-1][0]]
    return (lost[0] if lost else points[-1].time_s) - points[0].start_s, last_finite


def last_loss(summary: Summary) -> str:
    """Show the last loss; one that was lost with when, and what it was before."""
    shown = show_loss(summary.last_loss)
    if summary.loss_lost_s is None:
        return shown
    before = "" if summary.last_finite_loss is None else f", {show_loss(summary.last_finite_loss)} before"
    return f"{shown} since {show_time(summary.loss_lost_s)}{before}"


def bound_shares(recorded: RunOutline) -> tuple[BoundShare, ...]:
    """Return the share of the judged time for which each bound held."""
    judged = [(each, each.verdict) for each in recorded.stretches if each.verdict is not None]
    whole_s = sum(stretch.end_s - stretch.start_s for stretch, _ in judged)
    if whole_s <= 0:
        return ()
    groups: dict[str, list[tuple[Stretch, Verdict]]] = {}
    for stretch, verdict in judged:
        groups.setdefault(verdict.bound, []).append((stretch, verdict))
    found = []
    for bound, group in groups.items():
        # The middle one speaks for all: the first and the last are half something else.
        said = group[len(group) // 2][1]
        share = sum(stretch.end_s - stretch.start_s for stretch, _ in group) / whole_s
        found.append(
            BoundShare(bound=bound, share=share, sentence=said.sentence, action=said.action, rules=said.rules)
        )
    return tuple(sorted(found, key=lambda each: -each.share))


def _over(amount: float | None, number: int | None) -> float | None:
    return None if amount is None or not number else amount / number
