"""The monitor's view of a job: its channel, read twice, gives the figures of the time between.

The same code serves a monitor inside the job and one beside it that was given the job's number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from flatout.ground.runs import CHANNEL_FILE, is_alive, read_run
from flatout.monitor.job.channel import JobRecord, read_channel
from flatout.monitor.sample import GpuSample, JobSample, JobState

NO_DATA = "the job does not say when it waits for data: iterate over flatout.watch(loader)"
NO_STEP = "no step ended in this span"
ONLY_MEMORY = "this GPU reports only its memory, through the job's torch"
CLOCK_JUMP_S = 2.0  # beyond what two clocks and a late thread differ by
NO_RECORD = "the job has not reported yet"
TAKEN_OVER = (  # from the record as they are
    "steps",
    "samples",
    "loss",
    "learning_rate",
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
)


class JobMeter:
    """Reads one job; `gpu_uuid` is the GPU it computes on, once it has said so.

    `told_gpu` is a GPU that NVML does not know, as the job's torch describes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = read_run(folder)
        self.gpu_uuid: str | None = None
        self.told_gpu: GpuSample | None = None
        self._last: JobRecord | None = None
        self._read_at_s: float | None = None  # of a clock that is not set
        self._since_step_s = 0.0
        self._is_own = self.run.pid == os.getpid()

    @property
    def pid(self) -> int:
        return self.run.pid

    def read(self, time_s: float, now_s: float) -> JobSample:
        """Read the job since the last reading, at two clocks: since the epoch, and one that is never set."""
        progress = read_channel(self.folder / CHANNEL_FILE)
        if progress is None:
            return self._sample(state=self._state(None), missing={"steps": NO_RECORD})
        before, self._last = self._last, progress
        self.gpu_uuid = progress.gpu_uuid or self.gpu_uuid
        if progress.device_name is not None:
            self.told_gpu = _told_gpu(progress)
        missing: dict[str, str] = {}
        if not progress.sees_data:
            missing["phases"] = NO_DATA
        longest_s = self._longest_s(now_s)
        self._since_step_s = min(max(time_s - progress.time_s, 0.0), longest_s)
        span_s, steps, samples, phases, device_phases = 0.0, 0, None, None, None
        # Totals that fell were begun again, and their difference means nothing.
        if before is not None and progress.number > before.number and progress.steps >= before.steps:
            span_s, steps = progress.time_s - before.time_s, progress.steps - before.steps
            samples = _difference(progress.samples, before.samples)
            phases = _shares(progress.host_s, before.host_s) if progress.sees_data else None
            if progress.device_s is not None and before.device_s is not None and progress.sees_data:
                device_phases = _shares(progress.device_s, before.device_s)
        if not steps:
            missing |= dict.fromkeys(("step_s", "steps_per_s"), NO_STEP)
        # Where the clock was set, the time between two records is not that between their steps.
        is_timed = steps > 0 and 0 < span_s <= longest_s and before is not None
        # The phases leave out what lies between two loops, such as an evaluation.
        stepping_s = sum(progress.host_s.values()) - sum(before.host_s.values()) if before else 0.0
        return self._sample(
            state=self._state(progress),
            step_s=stepping_s / steps if is_timed else None,
            steps_per_s=steps / span_s if is_timed else None,
            samples_per_s=samples / span_s if samples and is_timed else None,
            since_step_s=self._since_step_s,
            phases=phases,
            device_phases=device_phases,
            missing=missing,
            loss_is_finite=None if progress.loss is None else math.isfinite(progress.loss),
            **{name: getattr(progress, name) for name in TAKEN_OVER},
        )

    def _longest_s(self, now_s: float) -> float:
        """Return the longest time that can lie between two records, or since the last step."""
        before_s, self._read_at_s = self._read_at_s, now_s
        return math.inf if before_s is None else self._since_step_s + now_s - before_s + CLOCK_JUMP_S

    def _sample(self, **figures: object) -> JobSample:
        run = self.run
        return JobSample(
            pid=run.pid,
            name=run.name,
            rank=run.rank,
            world_size=run.world_size,
            **figures,  # type: ignore[arg-type]
        )

    def _state(self, progress: JobRecord | None) -> JobState:
        if progress is not None and progress.ended:
            return "ended"
        if self._is_own:
            return "running"
        # Only a job that reports says when it ends; of another it is not known that it died.
        gone: JobState = "died" if (self.folder / CHANNEL_FILE).exists() else "ended"
        if not is_alive(self.run.pid, self.run.process_started_s, self.run.process_key):
            return gone
        try:
            status = psutil.Process(self.run.pid).status()
        except psutil.Error:
            return gone
        return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def _told_gpu(progress: JobRecord) -> GpuSample:
    return GpuSample(
        index=0,
        name=progress.device_name,
        memory_used_bytes=progress.device_used_bytes,
        memory_total_bytes=progress.device_total_bytes,
        missing=dict.fromkeys(("utilisation_share", "sm_active_share", "power_w"), ONLY_MEMORY),
    )


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _shares(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float] | None:
    """Return the shares of a span; a phase that never took any time since the start was not measured."""
    measured = [phase for phase, seconds in after.items() if seconds > 0 or phase == "wait"]
    spent_s = {phase: max(after[phase] - before[phase], 0.0) for phase in measured}
    total_s = sum(spent_s.values())
    return {phase: seconds / total_s for phase, seconds in spent_s.items()} if total_s > 0 else None
