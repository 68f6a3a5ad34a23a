"""What harms a run whatever its steps do: a lost loss, memory that runs out, a stall, clocks held down.

These rest on curves, counters and the driver's own word, not on where the time of a step goes.

A rise of memory that ends in an out-of-memory looks unlike the growth of a cache, which jumps a few times
and stays: it goes up in most of the steps of the curve, and its second half rises at least half as fast as
its first.  The slope is Theil's: the median of the slopes between all pairs, which one jump does not move.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.ground.units import show_bytes, show_seconds, show_share
from flatout.monitor.sample import GpuSample, Sample, show_loss
from flatout.monitor.verdicts.window import Verdict, Window

FULL_WITHIN_S = 900.0
LEAST_RISE = 0.005  # of the memory there is
FEWEST_POINTS, MOST_POINTS = 8, 60
SHORTEST_RISE_S = 30.0  # any program grows for a few seconds
STEADY_SHARE = 0.6
STALL_STEPS = 10.0
SHORTEST_STALL_S = 30.0
# At its own power limit an H200 that multiplies matrices runs at 72 to 84 % of its highest clock.
HELD_CLOCK_SHARE = 0.6
FAULTS = ("hardware slowdown", "thermal limit (software)", "thermal limit (hardware)", "power brake")
LEAK_RULES = ("FO501",)


# The loss


def loss_is_lost(window: Window) -> Verdict | None:
    """Look for a loss that is NaN or infinite: whatever the run computes from here on is of no use."""
    losses = [each.job for each in window.samples if each.job is not None and each.job.loss is not None]
    if not losses or not losses[-1].has_bad_loss:
        return None
    finite = [job.loss for job in losses if not job.has_bad_loss]
    return Verdict(
        bound="diverged",
        sentence=f"the loss is {show_loss(losses[-1].loss)}: the run no longer learns",
        action="go back to the last checkpoint; lower the learning rate, clip gradients or check the data",
        evidence=(f"its last finite value was {show_loss(finite[-1])}",) if finite else (),
    )


# Memory


def memory_runs_out(window: Window) -> Verdict | None:
    return _gpu_memory(window) or _host_memory(window)


def _gpu_memory(window: Window) -> Verdict | None:
    """Look at the allocator's curve at the ends of steps: flat in a healthy run, whatever the cache does."""
    gpu, job = window.gpu, window.job
    if gpu is None or gpu.memory_total_bytes is None or gpu.memory_used_bytes is None:
        return None
    is_own = job is not None and job.allocated_bytes is not None
    points = [
        (sample.time_s, _allocated(sample) if is_own else _used(sample, gpu)) for sample in window.samples
    ]
    rise = fit_rise(points, least=LEAST_RISE * gpu.memory_total_bytes)
    if rise is None:
        return None
    cached_bytes = 0
    if job is not None and job.reserved_bytes is not None and job.allocated_bytes is not None:
        cached_bytes = max(job.reserved_bytes - max(job.allocated_bytes, job.peak_allocated_bytes or 0), 0)
    room_bytes = max(gpu.memory_total_bytes - gpu.memory_used_bytes, 0) + cached_bytes
    what = "memory that tensors hold" if is_own else f"memory of GPU {gpu.index}"
    action = (
        "something keeps the tensors of past steps: run flatout diagnose, or save a checkpoint and stop"
        if is_own
        else "save a checkpoint and lower the batch size (flatout plan finds the largest that fits)"
    )
    return _full_soon(rise, room_bytes, what, action, LEAK_RULES if is_own else ())


def _host_memory(window: Window) -> Verdict | None:
    host = window.samples[-1].host
    if host.memory_total_bytes is None or host.memory_used_bytes is None:
        return None
    points = [(sample.time_s, sample.host.memory_used_bytes) for sample in window.samples]
    rise = fit_rise(points, least=LEAST_RISE * host.memory_total_bytes)
    if rise is None:
        return None
    where = "the container's memory" if host.memory_limited_by == "the control group" else "the host's memory"
    action = "find what the loader or the loop collects in lists, or lower num_workers"
    return _full_soon(rise, host.memory_total_bytes - host.memory_used_bytes, where, action, ())


def _full_soon(rise: Rise, room_bytes: int, what: str, action: str, rules: tuple[str, ...]) -> Verdict | None:
    left_s = room_bytes / rise.bytes_per_s
    if left_s > FULL_WITHIN_S:
        return None
    return Verdict(
        bound="memory",
        sentence=f"{what} keeps growing and runs out in about {show_seconds(left_s)}",
        action=action,
        evidence=(
            f"it grows by {show_bytes(rise.bytes_per_s)} a second, for {show_seconds(rise.span_s)} so far",
            f"it went up at {show_share(rise.steady_share)} of the readings",
            f"{show_bytes(room_bytes)} are left",
        ),
        rules=rules,
    )


def _allocated(sample: Sample) -> int | None:
    return None if sample.job is None else sample.job.allocated_bytes


def _used(sample: Sample, gpu: GpuSample) -> int | None:
    same = sample.gpu(gpu.index)
    return None if same is None else same.memory_used_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A steady rise."""

    bytes_per_s: float
    span_s: float
    steady_share: float  # of the steps of the curve that went up


def fit_rise(points: Sequence[tuple[float, float | None]], *, least: float) -> Rise | None:
    """Fit the rise of (seconds, bytes); None if it is not steady, or below `least` bytes in all."""
    known = [(time_s, value) for time_s, value in points if value is not None]
    known = known[:: max(len(known) // MOST_POINTS, 1)]
    if len(known) < FEWEST_POINTS:
        return None
    (first_s, first), (last_s, last) = known[0], known[-1]
    grown, span_s = last - first, last_s - first_s
    if grown < least or span_s < SHORTEST_RISE_S:
        return None
    ups = [after > before for (_, before), (_, after) in itertools.pairwise(known)]
    steady_share = sum(ups) / len(ups)
    slope, later = _slope(known), _slope(known[len(known) // 2 :])
    if steady_share < STEADY_SHARE or slope <= 0 or later < slope / 2:
        return None
    return Rise(bytes_per_s=slope, span_s=span_s, steady_share=steady_share)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    pairs = itertools.combinations(points, 2)
    return statistics.median((b - a) / (t - s) for (s, a), (t, b) in pairs if t > s)


# A job that stands still


def stands_still(window: Window) -> Verdict | None:
    job = window.samples[-1].job
    if job is None or job.state in ("ended", "died") or not job.steps:
        return None
    if job.state == "stopped":
        return Verdict(
            bound="stalled",
            sentence=f"process {job.pid} is stopped by a signal",
            action=f"continue it with kill -CONT {job.pid}",
            evidence=("the operating system reports the state 'stopped'",),
        )
    usual = [each.job.step_s for each in window.samples if each.job is not None and each.job.step_s]
    usual_s = statistics.median(usual) if usual else 0.0
    if job.since_step_s is None or job.since_step_s < max(SHORTEST_STALL_S, STALL_STEPS * usual_s):
        return None
    known = f"; before that a step took {show_seconds(usual_s)}" if usual else ""
    return Verdict(
        bound="stalled",
        sentence=f"no step has ended for {show_seconds(job.since_step_s)}",
        action=f"an evaluation or a checkpoint may be running; py-spy dump --pid {job.pid} shows where it is",
        evidence=(f"step {job.steps} ended {show_seconds(job.since_step_s)} ago{known}",),
    )


# Clocks


def is_held_down(window: Window) -> Verdict | None:
    """Trust the driver's reasons; a power cap is normal for a busy GPU unless its clock is far down."""
    gpu = window.gpu
    if gpu is None:
        return None
    told = [
        same.throttle_reasons
        for sample in window.samples
        if (same := sample.gpu(gpu.index)) is not None and same.throttle_reasons is not None
    ]
    if not told:
        return None
    clock = gpu.sm_clock_hz / gpu.sm_clock_max_hz if gpu.sm_clock_hz and gpu.sm_clock_max_hz else None
    counts = {
        reason: sum(reason in reasons for reasons in told) / len(told) for reason in (*FAULTS, "power cap")
    }
    faults = [reason for reason in FAULTS if counts[reason] >= 0.3]
    is_capped = counts["power cap"] >= 0.5 and clock is not None and clock < HELD_CLOCK_SHARE
    if not faults and not is_capped:
        return None
    reason = faults[0] if faults else "power cap"
    action = (
        f"raise the power limit of {gpu.power_limit_w:.0f} W if it is below the board's own"
        if reason == "power cap" and gpu.power_limit_w
        else "check cooling, power supply and what else runs in the machine"
    )
    shown = "" if clock is None else f" at {show_share(clock)} of its highest clock"
    return Verdict(
        bound="throttled",
        sentence=f"GPU {gpu.index} is slowed by its {reason}{shown}",
        action=action,
        evidence=tuple(f"{name}: {show_share(counts[name])} of the samples" for name in [*faults, reason][:1])
        + ((f"{gpu.temperature_c:.0f} °C at most",) if gpu.temperature_c is not None else ()),
    )
