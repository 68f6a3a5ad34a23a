"""The sentences that terminal and page share.

A counterfactual is read as a ratio of two step times with an interval.  An interval that contains 1 is no
difference; a cause is called "not the limit" only if the interval is also narrow, because a wide one says
nothing.  The half batch separates two costs: work done once per step (launches, Python) stays when half of
the samples go, work done per sample halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from flatout.doctor import loading
from flatout.doctor.finding import Ceiling, Finding, FixSafety
from flatout.ground.units import UNKNOWN, show_interval, show_ratio, show_seconds, show_share
from flatout.measure import PHASES
from flatout.measure.evidence import Counterfactual, Evidence, ObservedJob, Rank
from flatout.measure.run.ranks.merging import MEETING
from flatout.measure.run.step_blocks.schedule import ENDED_FIRST, NO_TIME

LEAST_DIFFERENT = 1.05  # the step's speed-up over the job's, to show both
OUTSIDE_MODEL = ("wait", "transfer", "rest")  # the phases in which batches are made
NARROW = 0.1  # an interval this close to 1 shows that a cause is not the limit
MAY_GAIN, MOST_UNDECIDED = 1.5, 3  # the upper end of an interval that leaves a gain open; arms named
MORE_STEPS = "Give it more steps or epochs."
ENOUGH_STEPS, SET_UP_S = 100, 30.0  # steps to look for causes in; seconds before the first of them, about
STRAGGLES = 1.1  # a rank this much slower than the median of all

SAFETY: dict[FixSafety, str] = {
    "exact": "the numbers stay the same",
    "reordered": "the numbers change by rounding only",
    "lossy": "the numbers change: compare the loss curves",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmReading:
    """A sentence about a counterfactual, and its step time as a fraction of the baseline's."""

    label: str
    figure: str
    words: str
    fraction: float
    fraction_low: float
    fraction_high: float


# By label or kind: what the steps of an arm changed, and the cost that their gain shows.
ARMS = {
    "cached": ("on cached batches", "the loader"),
    "reads-free": ("with free reads of device values", "waiting for these values"),
    "staged": ("with batches in page-locked memory", "copying from pageable memory"),
    "staged-on-device": ("with batches on the device already", "copying them"),
    "trimmed": ("with batches cut to their longest row", "padding shared by all rows"),
    "trimmed, similar lengths": ("with batches of similar length", "padding"),
    "autocast": ("with autocast on", "computing in 32 bits"),
    "tf32": ("with TF32 products", "computing products in full 32 bits"),
    "unsynchronised": ("without an exchange of gradients", "the exposed exchange of gradients"),
    "workers": ("with num_workers={value:g}", "the current number of workers"),
    "whole-batches": ("with all rows of a batch taken at once", "taking rows one by one"),
    "threads": ("with {value:g} threads", "the current number of threads"),
    "garbage-off": ("without garbage collections", "collecting garbage"),
    "batched-call": ("with one batched call at {place}", "the loop of calls"),
    "library-recurrence": ("with one recurrent call at {place}", "the loop of cells"),
    "merged-groups": ("with equal parameter groups merged", "the number of parameter groups"),
    "foreach-optimizer": ("with lists of parameters updated at once", "the optimizer's loop"),
    "fused-optimizer": ("with a fused optimizer", "the optimizer's many calls"),
    "no-anomaly-detection": ("without anomaly detection", "anomaly detection"),
    "no-empty-cache": ("without empty_cache()", "giving memory back"),
    "no-synchronize": ("without synchronize()", "waiting for the GPU"),
    "no-checkpointing": ("with activations kept", "recomputing activations"),
    "no-grad": ("without gradients of the call at {place}", "recording gradients that nothing uses"),
    "uncompiled": ("uncompiled", "compiled code"),
    "fused-attention": ("with attention in one call", "hand-written attention"),
    "channels-last": ("with channels last", "the layout of convolutions"),
    "padded-products": ("with layers padded to multiples of 64", "the odd sizes of layers"),
    "same": ("with nothing changed", "chance"),
}


TREATMENTS = tuple(kind for kind in ARMS if kind not in ("cached", "workers", "same", "uncompiled"))


def read_arms(evidence: Evidence) -> tuple[ArmReading, ...]:
    """Read every arm that changes the whole step; knocked-out blocks are in the causal map."""
    read = []
    for found in evidence.counterfactuals:
        if found.speedup_low <= 0 or found.kind == "knock-out":
            continue
        read.append(_read_half(found, evidence) if found.kind == "half" else read_arm(found, evidence))
    return tuple(read)


def read_arm(found: Counterfactual, evidence: Evidence) -> ArmReading:
    """Read an arm other than the half batch."""
    label, what = ARMS.get(found.label) or ARMS.get(found.kind) or (found.label, "what it leaves out")
    what = _loading(found) if found.kind == "cached" else what
    if found.speedup_low > 1:
        words = f"{what} costs {show_share(1 - 1 / found.speedup)} of the step"
        if found.kind == "cached":
            words = loader_costs(found, evidence)
        elif found.kind == "workers":
            words = _workers_cost(what, found, evidence)
    elif found.speedup_high < 1 + NARROW:
        words = f"{what} is not the limit"
    else:
        words = f"within the noise: this run cannot tell whether {what} is a limit"
    figure = f"{show_ratio(found.speedup)} {show_interval(found.speedup_low, found.speedup_high)} measured"
    named = label.format(value=found.value or 0, place=found.place or UNKNOWN)
    return _reading(found, label=named, figure=figure, words=words)


def _workers_cost(what: str, found: Counterfactual, evidence: Evidence) -> str:
    """Attribute to the number of workers at most the wait for batches, which is all that workers remove."""
    gained, waits = 1 - 1 / found.speedup, phase_shares(evidence).get("wait", 0.0)
    if waits >= gained:
        return f"{what} costs {show_share(gained)} of the step"
    return f"{what} costs at most {show_share(waits)} of the step, the time it waits for batches"


def _loading(cached: Counterfactual) -> str:
    """Name what steps on cached batches do without."""
    return "the loader" if cached.place is None else f"making the batch at {cached.place}"


def _read_half(found: Counterfactual, evidence: Evidence) -> ArmReading:
    fraction, low, high = (1 / value for value in (found.speedup, found.speedup_high, found.speedup_low))
    if high >= 1 and low < 1 - NARROW:
        words = "within the noise: this run cannot tell what limits the step"
    elif low >= 0.8:
        words = _bound_once_per_step(evidence)
    elif high <= 0.65 or fraction <= 0.5:
        words = _bound_per_sample(evidence)
    else:
        grows = show_share(2 * (1 - fraction))
        words = f"{grows} of the step grows with the batch, the rest is paid once per step"
    figure = f"a step takes {fraction:.2f} [{low:.2f}, {high:.2f}] of the full one"
    return _reading(found, label="on half the batch", figure=figure, words=words)


def _reading(found: Counterfactual, *, label: str, figure: str, words: str) -> ArmReading:
    return ArmReading(
        label=label,
        figure=figure,
        words=words,
        fraction=1 / found.speedup,
        fraction_low=1 / found.speedup_high,
        fraction_high=1 / found.speedup_low,
    )


def _bound_once_per_step(evidence: Evidence) -> str:
    if evidence.job.device == "cpu":
        return "bound by work done once per step, not by arithmetic on the samples"
    return "bound by launches and the host, not by the GPU's arithmetic"


def _bound_per_sample(evidence: Evidence) -> str:
    busy = evidence.kernels.busy_share if evidence.kernels else None
    if busy is None:
        return "bound by work that grows with the batch"
    if busy >= 0.7:
        return "bound by the GPU's own work"
    return f"bound by work per sample on the host: the GPU is busy for only {show_share(busy)} of the step"


def say_bound(evidence: Evidence) -> str:
    """Say what the step spends its time on, and how near that is to what the device can do."""
    return " ".join(filter(None, (_bound(evidence), at_roofline(evidence))))


def at_roofline(evidence: Evidence) -> str | None:
    """Say how much of the step its arithmetic or its bytes fill, at the speeds measured here."""
    roofline, step_s = evidence.roofline, evidence.step_s
    if roofline is None or not step_s:
        return None
    of_bytes = roofline.memory_s > roofline.compute_s
    needed_s = max(roofline.memory_s, roofline.compute_s)
    what = "reading and writing its tensors" if of_bytes else "its matrix products"
    if needed_s >= step_s:
        return f"It runs at the roofline: {what} alone would take as long on this device."
    return (
        f"It runs at {show_share(needed_s / step_s)} of the roofline: {what} alone would take "
        f"{show_seconds(needed_s)} of {show_seconds(step_s)} on this device."
    )


def _bound(evidence: Evidence) -> str:
    """Say in one sentence what the step spends its time on."""
    step_s = evidence.step_s
    if step_s is None:
        return "No step was measured."
    cached = evidence.counterfactual("cached")
    freed = _most_freed(evidence)
    if cached is not None and cached.speedup_low > 1 and 2 * freed >= 1 - 1 / cached.speedup >= 1 / 3:
        is_capped = 1 - 1 / cached.speedup > freed  # no more is promised than was seen
        without_s = step_s * (1 - freed) if is_capped else step_s / cached.speedup
        how = "without its waits" if is_capped else "on cached batches"
        return (
            f"The loader limits the step: {show_seconds(step_s)} as it is, {show_seconds(without_s)} {how}."
        )
    busy = evidence.kernels.busy_share if evidence.kernels else None
    if busy is not None and busy >= 0.8:
        return f"The GPU limits the step: it is busy for {show_share(busy)} of it."
    if busy is not None:
        return (
            f"The host limits the step: the GPU is busy for {show_share(busy)} of it and waits for the rest."
        )
    phases = phase_means(evidence)
    longest = max(phases, key=lambda phase: phases[phase])
    share = phases[longest] / _whole(evidence, phases)
    part = "Most" if share > 0.5 else "The largest part"
    what = "the rest, outside these phases" if longest == "rest" else longest
    return f"{part} of the step is {what}: {show_share(share)}."


def _most_freed(evidence: Evidence) -> float:
    """Return the share of the step that a free loader can save at most."""
    wait = phase_shares(evidence).get("wait", 0.0)
    training = [loader for loader in evidence.loaders if loader.trains]
    return max((loading.most_freed_share(evidence, loader, wait) for loader in training), default=wait)


def phase_means(evidence: Evidence, *, device: bool = False) -> dict[str, float]:
    """Return the mean seconds of each phase over the steps that count; empty if nothing was measured."""
    steps = evidence.kept("real") or evidence.kept("warmup")
    timed = [step.device_phases_s if device else step.phases_s for step in steps]
    known = [phases for phases in timed if phases is not None]
    if not known:
        return {}
    return {phase: sum(phases.get(phase, 0.0) for phases in known) / len(known) for phase in PHASES}


def phase_shares(evidence: Evidence, *, device: bool = False) -> dict[str, float]:
    """Return the phases as shares of the step, which add up to at most 1."""
    phases = phase_means(evidence, device=device)
    whole = _whole(evidence, phases)
    return {phase: seconds / whole for phase, seconds in phases.items()} if whole else {}


def _whole(evidence: Evidence, phases: dict[str, float]) -> float:
    # Events of the stream and the host's clock disagree a little; neither may make a share exceed 1.
    return max(evidence.step_s or 0.0, sum(phases.values()))


def straggler(ranks: Sequence[Rank]) -> tuple[Rank, float] | None:
    """Return the rank that the others wait for, and its excess over the median; None if all may be alike.

    Ranks of a synchronous job all take the same step, because they meet in backward and in the optimizer, so
    a rank is judged by its own work before that.
    """
    alone = {rank.rank: own_work_s(rank) for rank in ranks}
    if len(alone) < 2:
        return None
    slowest = max(ranks, key=lambda rank: alone[rank.rank])
    usual = median(seconds for rank, seconds in alone.items() if rank != slowest.rank)
    if usual <= 0 or alone[slowest.rank] < usual * STRAGGLES or least_lost_s(slowest, ranks) <= 0:
        return None
    return slowest, alone[slowest.rank] / usual


def own_work_s(rank: Rank) -> float:
    """Return a rank's own work: the phases in which it meets no others."""
    return sum(seconds for phase, seconds in rank.phases_s.items() if phase not in waiting_phases(rank))


def waiting_phases(rank: Rank) -> tuple[str, ...]:
    """Return the phases that include waits for other ranks."""
    return (*MEETING, *rank.meets_in)


def least_lost_s(slowest: Rank, ranks: Sequence[Rank]) -> float:
    """Return the least by which the slowest rank exceeds the others' median, by the 95 % intervals."""
    least_s = own_work_s(slowest) if slowest.own_low_s is None else slowest.own_low_s
    others = [rank for rank in ranks if rank.rank != slowest.rank]
    return least_s - median(
        own_work_s(rank) if rank.own_high_s is None else rank.own_high_s for rank in others
    )


def node_name(rank: Rank, ranks: Sequence[Rank]) -> str | None:
    """Return a rank's host, with a number if two nodes share one; None if all ranks share a node."""
    if len({(each.host, each.node) for each in ranks}) < 2:
        return None
    host = rank.host or UNKNOWN
    is_shared = len({each.node for each in ranks if each.host == rank.host}) > 1
    return f"{host} (node {rank.node})" if is_shared else host


def rank_name(rank: Rank, ranks: Sequence[Rank]) -> str:
    """Return `rank 3`, or `rank 3 on gpu-node-2`."""
    node = node_name(rank, ranks)
    return f"rank {rank.rank}" if node is None else f"rank {rank.rank} on {node}"


def straggler_words(ranks: Sequence[Rank]) -> str:
    found = straggler(ranks)
    if found is None:
        return "No rank makes the others wait."
    rank, excess = found
    return (
        f"R{rank_name(rank, ranks)[1:]} is the straggler: outside backward and the optimizer it takes "
        f"{show_ratio(excess)} the median of the others."
    )


def ended_early(job: ObservedJob) -> str | None:
    """Say that the job ended before the diagnosis was complete; None if it did not."""
    if job.ended not in ("crashed", "interrupted"):
        return None
    how = "was interrupted" if job.ended == "interrupted" else "crashed"
    return f"The job {how} before the diagnosis was complete" + (f": {job.error}" if job.error else ".")


def show_ceiling(ceiling: Ceiling | None) -> str:
    """Format a ceiling: `1.80× [1.60, 2.00] measured`, `1.11× of the job measured`."""
    if ceiling is None:
        return UNKNOWN
    if is_of_the_job(ceiling):
        return f"{show_ratio(ceiling.job_speedup)} of the job {ceiling.source}"
    parts = (
        show_ratio(ceiling.speedup),
        show_interval(ceiling.speedup_low, ceiling.speedup_high),
        ceiling.source,
    )
    return " ".join(part for part in parts if part)


def is_of_the_job(ceiling: Ceiling) -> bool:
    """Return whether a ceiling is for the job alone, because its cause is outside the step."""
    return ceiling.speedup == 1 and (ceiling.job_speedup or 1) > 1


def proof_words(finding: Finding) -> Iterator[str]:
    """Yield what proves a finding, or why nothing does, and which other findings the same arm proves."""
    ceiling = finding.ceiling
    if ceiling is not None and ceiling.arm is not None and not is_of_the_job(ceiling):
        of_job = ceiling.job_speedup or ceiling.speedup
        apart = of_job * LEAST_DIFFERENT < ceiling.speedup
        whole = f", {show_ratio(of_job)} for the whole job" if apart else ""
        takes = f"the step takes {show_seconds(ceiling.step_s)}"
        if ceiling.is_capped:
            yield f"without the observed time {takes}{whole}; {ceiling.arm} shortened it more"
        else:
            yield f"measured ({ceiling.arm}): {takes} without this{whole}"
    if finding.no_ceiling is not None:
        yield f"no ceiling: {finding.no_ceiling}"
    if finding.tune:
        yield f"flatout tune can try it: {', '.join(finding.tune)}"
    for other in finding.also:
        share = f", {show_share(other.share)} of the step" if other.share is not None else ""
        yield f"the same cause: {other.code} {other.name} at {other.place or UNKNOWN}{share}"


def instruments(evidence: Evidence) -> tuple[str, ...]:
    """List what was measured, for a reader who sees no findings."""
    taken = []
    if steps := len(evidence.kept("real")):
        taken.append(f"{steps} timed {'step' if steps == 1 else 'steps'}")
    if evidence.loaders:
        taken.append("the loader")
    if evidence.sites or evidence.module_calls:
        taken.append("tensor creations, indexing, copies and waits by line")
    if evidence.kernels:
        taken.append("kernels" if evidence.job.device != "cpu" else "operators")
    if evidence.memory:
        taken.append("memory growth")
    taken.extend(f"the step {reading.label}" for reading in read_arms(evidence))
    return tuple(taken)


def too_little(evidence: Evidence) -> str | None:
    """Say what to do if the time ended before any cause could be looked for; None if one was."""
    left_out = any(reason.startswith("count:") for reason in evidence.missing)
    ended_early = evidence.job.ended == "finished" and not (evidence.sites or evidence.module_calls)
    treated = any(found.kind != "knock-out" for found in evidence.counterfactuals)
    if evidence.step_s is None or treated or not (left_out or ended_early):
        return None
    number = len(evidence.steps)
    steps = "step" if number == 1 else "steps"
    little = "Too little was measured to find a cause:"
    if ended_early:
        return f"{little} the job ended after {number} {steps}. Let it run for {ENOUGH_STEPS} steps."
    return (
        f"{little} {number} {steps} of {show_seconds(evidence.step_s)} fitted into the time. "
        f"Try --seconds {_enough_s(evidence)}."
    )


def short_of_time(evidence: Evidence) -> str | None:
    """Say what to do if arms were left out because the time was up or the job ended; None otherwise."""
    num_late = sum(arm.reason == NO_TIME for arm in evidence.arms_not_run)
    num_ended = sum(arm.reason == ENDED_FIRST for arm in evidence.arms_not_run)
    if evidence.step_s is None:
        return None
    if num_ended:
        return f"The job ended before {_arms(num_ended)} could be measured. {MORE_STEPS}"
    return (
        f"No time was left for {_arms(num_late)}: try --seconds {_enough_s(evidence)}." if num_late else None
    )


def undecided(evidence: Evidence) -> str | None:
    """Name arms that may gain much, by intervals that also contain no gain; None if there are none."""
    may_gain = [
        found
        for found in evidence.counterfactuals
        if found.kind in ARMS
        and found.kind not in ("same", "uncompiled")
        and found.speedup_low <= 1
        and found.speedup_high >= MAY_GAIN
    ]
    if not may_gain:
        return None
    most = sorted(may_gain, key=lambda found: -found.speedup_high)[:MOST_UNDECIDED]
    listed = ", ".join(
        f"{read_arm(found, evidence).label} (at most {show_ratio(found.speedup_high)})" for found in most
    )
    return f"steps vary too much to tell what they would gain {listed}. Try a quieter machine, or longer."


def _arms(number: int) -> str:
    return "one arm" if number == 1 else f"{number} arms"


def _enough_s(evidence: Evidence) -> int:
    """Return the whole minutes that measuring such a job takes, its start included.

    What did not suffice is at least doubled: passes and arms take more than their steps.
    """
    set_up_s = sum(episode.seconds for episode in evidence.episodes if episode.kind == "set-up")
    steps_s = max(SET_UP_S, set_up_s) + ENOUGH_STEPS * (evidence.step_s or 0.0)
    return 60 * math.ceil(max(steps_s, 2 * (evidence.job.limit_s or 0.0)) / 60)


def loader_costs(cached: Counterfactual, evidence: Evidence) -> str:
    """Say what a free loader gains: at most the observed wait for it, or why it is more."""
    if cached.place is not None:
        return _making_costs(cached, evidence)
    wait = phase_shares(evidence).get("wait", 0.0)
    gain, least = 1 - 1 / cached.speedup, 1 - 1 / cached.speedup_low
    if least <= wait + NARROW:  # the wait lies in the interval, or is more
        return f"the loader costs {show_share(min(gain, _most_freed(evidence)))} of the step"
    workers = any(loader.trains and loader.num_workers for loader in evidence.loaders)
    why = (
        "its workers share the cores with the step"
        if workers
        else "cached batches are warm in the CPU caches"
    )
    return (
        f"the step waits for the loader {show_share(wait)} of its time, and is {show_share(gain)} shorter "
        f"without it: {why}"
    )


def _making_costs(cached: Counterfactual, evidence: Evidence) -> str:
    """Say what a batch that the script makes costs: at most the time outside the model and the optimizer."""
    gain, shares = 1 - 1 / cached.speedup, phase_shares(evidence)
    outside = sum(shares.get(phase, 0.0) for phase in OUTSIDE_MODEL) if shares else gain
    if gain <= outside + NARROW:
        return f"{_loading(cached)} costs {show_share(min(gain, outside))} of the step"
    return (
        f"{_loading(cached)} costs at most {show_share(outside)} of the step, the time outside the model and "
        "the optimizer; the rest of this gain is noise, or caches that kept batches warm"
    )
