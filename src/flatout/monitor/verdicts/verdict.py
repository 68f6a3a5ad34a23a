"""What a run is bound by at present, in one sentence, with its evidence and what to do next.

The evidence is where the time of a step goes.  Utilisation alone proves nothing: it says that some kernel
ran, not that the GPU was filled, and a GPU at 30 % may wait for data, for the host, or for nobody.  So
without step phases the answer is "unknown", with what is missing.  Two things are known without them: what
the driver itself says about its clocks, and where a rising curve of memory will end.

Each question is a function of the same window of samples; those that have an answer are given in order of
urgency.  Rule codes are the doctor's: `flatout diagnose` finds the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from flatout.ground.units import show_bytes, show_ratio, show_seconds, show_share
from flatout.monitor.sample import GpuSample, Sample, last_seconds, merge
from flatout.monitor.verdicts.alarms import is_held_down, loss_is_lost, memory_runs_out, stands_still
from flatout.monitor.verdicts.window import Verdict, Window

WINDOW_S = 60.0
ENOUGH_SAMPLES = 5
WAIT_SHARE = 0.15  # of the step; less is not worth a search
BUSY_SHARE = 0.7  # of the time some kernel ran; below it the GPU stood still for a third of it
FILLED_SHARE = 0.3  # of its processors; below it kernels are too small for the GPU
IDLE_SHARE = 0.01
IDLE_MEMORY_SHARE = 0.05  # a context without work takes some hundred megabytes
COMPUTING_CORES = 0.5  # that a loop keeps busy if most of it is computation
CROWDED_SHARE = 0.9  # of the CPU; above it a job may be kept from its work by others

DATA_RULES = ("FO101", "FO102", "FO103")
TRANSFER_RULES = ("FO201",)
HOST_RULES = ("FO202", "FO301", "FO302", "FO304")
SMALL_KERNEL_RULES = ("FO301", "FO303", "FO304")
COMPUTE_RULES = ("FO401", "FO104")


def verdict(samples: Sequence[Sample]) -> Verdict:
    """Return the most urgent answer for the last minute of `samples`, in order of time."""
    return verdicts(samples)[0]


def verdicts(samples: Sequence[Sample]) -> tuple[Verdict, ...]:
    """Return every answer that applies, the most urgent first; there is always one."""
    recent = drop_start(last_seconds(samples, WINDOW_S))
    last = recent[-1].job
    if last is not None and last.has_bad_loss:  # one sample is enough, also after the end
        return judge(recent)
    if len(recent) < ENOUGH_SAMPLES:
        number = f"{len(recent)} sample{'' if len(recent) == 1 else 's'}"
        reason = f"{number} so far; a verdict needs {ENOUGH_SAMPLES}"
        return (_unknown(reason, action="keep watching for a few seconds"),)
    if last is not None and last.state in ("ended", "died"):
        return (_unknown(f"the job has {last.state}", action="flatout report shows the whole run"),)
    return judge(recent)


def judge(samples: Sequence[Sample]) -> tuple[Verdict, ...]:
    """Ask every question about a stretch of samples of any length, live or past."""
    window = Window(samples=tuple(samples), mean=merge(samples))
    found = [answer for question in QUESTIONS if (answer := question(window)) is not None]
    return tuple(found) or (_unknown_of(window),)


def drop_start(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Drop the start of the job: imports and the first batch leave a GPU idle in any case."""
    last = samples[-1].job
    if last is None or not last.steps:
        return tuple(samples)
    return tuple(itertools.dropwhile(lambda sample: sample.job is None or not sample.job.steps, samples))


# Where the step's time goes


def _data(window: Window) -> Verdict | None:
    waited = _starved_share(window)
    if waited is None or waited[0] < WAIT_SHARE:
        return None
    share, evidence = waited
    return Verdict(
        bound="data",
        sentence=f"the loader is too slow: {show_share(share)} of the step is a wait for data",
        action="run flatout diagnose to see which part of loading; num_workers is the first thing to look at",
        evidence=(*evidence, f"without the wait a step would be {show_ratio(1 / (1 - share))} as fast"),
        rules=DATA_RULES,
    )


def _starved_share(window: Window) -> tuple[float, tuple[str, ...]] | None:
    """Return the share of a step that was lost waiting for data, and the evidence.

    The GPU's own events decide.  Without them the host's wait is an upper bound, because the GPU may have
    had work left; it stood still for no longer than it was not busy.
    """
    job, gpu = window.job, window.gpu
    if job is None or job.phases is None:
        return None
    host_share = job.phases.get("wait", 0.0)
    evidence = [f"the host waits for {show_share(host_share)} of its time"]
    if job.device_phases is not None:
        share = min(job.device_phases.get("wait", 0.0), 0.99)
        return share, (f"the GPU idles for {show_share(share)} of the step while it waits", *evidence)
    if gpu is None:
        return min(host_share, 0.99), tuple(evidence)
    if gpu.utilisation_share is None:
        return None
    share = min(host_share, 1.0 - gpu.utilisation_share)
    return min(share, 0.99), (*evidence, f"no kernel runs in {show_share(1 - gpu.utilisation_share)} of it")


def _transfer(window: Window) -> Verdict | None:
    job = window.job
    share = None if job is None or job.phases is None else job.phases.get("transfer")
    if share is None or share < WAIT_SHARE:
        return None
    return Verdict(
        bound="transfer",
        sentence=f"copies to the GPU take {show_share(share)} of the step",
        action="pin the loader's memory and copy with non_blocking=True",
        evidence=(f"the host spends {show_share(share)} of its time in copies",),
        rules=TRANSFER_RULES,
    )


def _host(window: Window) -> Verdict | None:
    """Look for a GPU that waits neither for data nor works: it waits for the host's next kernel."""
    waited, gpu = _starved_share(window), window.gpu
    if waited is None or waited[0] >= WAIT_SHARE or gpu is None or gpu.utilisation_share is None:
        return None
    evidence: tuple[str, ...] = (
        f"the GPU waits for data in only {show_share(waited[0])} of the step",
        f"a kernel runs in {show_share(gpu.utilisation_share)} of the time",
    )
    if gpu.sm_active_share is not None:
        evidence += (f"{show_share(gpu.sm_active_share)} of its processors are active on average",)
    if gpu.utilisation_share < BUSY_SHARE:
        return Verdict(
            bound="host",
            sentence=f"the host is too slow for GPU {gpu.index}: the GPU has nothing to do in "
            f"{show_share(1 - gpu.utilisation_share)} of the time, and not for lack of data",
            action="run flatout diagnose: it names the lines that synchronise, or launch many small kernels",
            evidence=evidence,
            rules=HOST_RULES,
        )
    if gpu.sm_active_share is not None and gpu.sm_active_share < FILLED_SHARE:
        return Verdict(
            bound="host",
            sentence=f"the kernels are too small for GPU {gpu.index}: one always runs, "
            f"but only {show_share(gpu.sm_active_share)} of its processors work",
            action="raise the batch size (flatout plan) or run flatout diagnose for loops over rows",
            evidence=evidence,
            rules=SMALL_KERNEL_RULES,
        )
    return None


def _idle_gpu(window: Window) -> Verdict | None:
    """Look for another GPU that the job may use, empty and idle."""
    job, gpu = window.job, window.gpu
    if job is None or job.visible_gpus is None or job.step_s is None or gpu is None:
        return None
    idle = [
        other
        for other in window.mean.gpus
        if other.index in job.visible_gpus and other.key != gpu.key and _is_idle(other)
    ]
    if not idle or (job.world_size or 1) > len(job.visible_gpus) - len(idle):
        return None
    numbers = ", ".join(str(other.index) for other in idle)
    return Verdict(
        bound="idle-gpu",
        sentence=f"GPU {numbers} of {len(job.visible_gpus)} does nothing, although this job may use it",
        action=f"start {len(job.visible_gpus)} processes with torchrun, or give it to another job",
        evidence=tuple(
            f"GPU {other.index}: no kernel for {show_seconds(window.mean.span_s)}, "
            f"{show_bytes(other.memory_used_bytes)} in use"
            for other in idle
        ),
    )


def _is_idle(gpu: GpuSample) -> bool:
    if gpu.lost or gpu.utilisation_share is None or not gpu.memory_total_bytes:
        return False
    is_empty = (gpu.memory_used_bytes or 0) / gpu.memory_total_bytes < IDLE_MEMORY_SHARE
    return gpu.utilisation_share < IDLE_SHARE and is_empty


def _healthy(window: Window) -> Verdict | None:
    """Check that the step computes, on the GPU or, without one, on the CPU."""
    waited, gpu, job = _starved_share(window), window.gpu, window.job
    if waited is None or waited[0] >= WAIT_SHARE or job is None:
        return None
    evidence: tuple[str, ...] = (f"{show_share(waited[0])} of the step is a wait for data",)
    if gpu is None:
        cores = _own_cores(window)
        if window.mean.gpus or cores is None or cores < COMPUTING_CORES:
            return None
        evidence += (_show_cores(window),)
        return Verdict(
            bound="compute",
            sentence=f"the CPU computes for {show_share(1 - waited[0])} of the step",
            action="a GPU, or less work per step, would make it faster; flatout diagnose finds wasted work",
            evidence=evidence,
            missing=(window.mean.missing.get("gpus", "no GPU is visible"),),
        )
    if gpu.utilisation_share is None or gpu.utilisation_share < BUSY_SHARE:
        return None
    evidence += (f"a kernel runs in {show_share(gpu.utilisation_share)} of the time",)
    missing: tuple[str, ...] = ()
    if gpu.sm_active_share is None:
        missing = ("whether its kernels fill the GPU: " + gpu.missing.get("sm_active_share", "not told"),)
    elif gpu.sm_active_share < FILLED_SHARE:
        return None
    else:
        evidence += (f"{show_share(gpu.sm_active_share)} of its processors are active on average",)
    if "power cap" in (gpu.throttle_reasons or ()) and gpu.power_limit_w:
        evidence += (f"it draws all the power it may, {gpu.power_limit_w:.0f} W: usual for a GPU at work",)
    return Verdict(
        bound="healthy",
        sentence=f"GPU {gpu.index} is the limit, as it should be: "
        f"it waits for data in {show_share(waited[0])} of the step",
        action="to go faster, make its work cheaper: flatout diagnose looks at precision and padding",
        evidence=evidence,
        rules=COMPUTE_RULES,
        missing=missing,
    )


def _own_cores(window: Window) -> float | None:
    """Return the cores that the job's own processes keep busy; the host's figure counts all."""
    own = [process.cpu_cores for process in window.mean.processes if process.of_job]
    known = [cores for cores in own if cores is not None]
    return sum(known) if known else None


def _show_cores(window: Window) -> str:
    cores, share = _own_cores(window), window.mean.host.cpu_share
    shown = (
        "how many cores it keeps busy is not known" if cores is None else f"it keeps {cores:.2g} cores busy"
    )
    is_crowded = share is not None and share > CROWDED_SHARE
    return f"{shown}; all processes together take {show_share(share)} of the CPU" if is_crowded else shown


QUESTIONS: tuple[Callable[[Window], Verdict | None], ...] = (
    loss_is_lost,
    memory_runs_out,
    stands_still,
    is_held_down,
    _data,
    _transfer,
    _host,
    _idle_gpu,
    _healthy,
)


# Nothing is known


def _unknown_of(window: Window) -> Verdict:
    job, mean = window.job, window.mean
    if job is None:
        return _unknown(
            "no job here reports its steps",
            action="start one with flatout watch --run train.py, or iterate over flatout.watch(loader)",
        )
    if job.phases is None:
        return _unknown(
            job.missing.get("phases") or job.missing.get("steps") or "no step ended in the last minute",
            action="iterate over flatout.watch(loader), so that waits for data are seen",
        )
    if mean.gpus and window.gpu is None:
        return _unknown("the job's GPU is not known, or does not answer", action="see the notes")
    if window.gpu is None:
        return _unknown(
            f"the job does not wait for its loader; {_show_cores(window)}",
            action=f"see what it waits for with py-spy dump --pid {job.pid}",
        )
    reason = window.gpu.missing.get("utilisation_share", "not told")
    return _unknown(f"the GPU does not tell how busy it is: {reason}", action="run flatout diagnose")


def _unknown(missing: str, *, action: str) -> Verdict:
    return Verdict(
        bound="unknown",
        sentence=f"it is not known what limits this run ({missing})",
        action=action,
        missing=(missing,),
    )
