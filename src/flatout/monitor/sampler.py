"""One thread that reads every meter once a second and hands the Sample on.

A deadline that was missed is skipped, never made up for: after a machine slept for an hour there is one
sample and a note about the gap, not 3600 samples in a burst.  The meters survive what they measure (a GPU
that is lost, a driver that is restarted, a job that dies), and the sampler survives its listeners: a listener
may be a user's code and raise anything.  The sampler reports that once, and calls the listener again with the
next sample.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from flatout.ground.errors import BadInput, FlatoutError
from flatout.monitor.job.job_meter import CLOCK_JUMP_S, JobMeter
from flatout.monitor.meters.gpus import GpuMeter
from flatout.monitor.meters.host import HostMeter
from flatout.monitor.meters.processes import ProcessMeter
from flatout.monitor.sample import GpuSample, JobSample, Sample, last_seconds

LOWEST_HZ, HIGHEST_HZ = 0.1, 10.0
GAP_PERIODS = 3.0
RECENT_S = 120.0
STOP_S = 10.0  # for a listener or a driver that hangs, at the end of a job that must end all the same

COUNTS_SLEEP = hasattr(time, "CLOCK_BOOTTIME")  # Linux

Listener = Callable[[Sample], None]


class Sampler:
    """Takes samples; `start` does so in a thread, `take` on the spot.

    Listeners are called in the sampler's thread, in order; a slow one delays the next sample.
    """

    def __init__(
        self,
        *,
        hz: float = 1.0,
        job: Path | None = None,
        gpus: GpuMeter | None = None,
        host: HostMeter | None = None,
        listeners: Iterable[Listener] = (),
        on_failure: Callable[[str], None] = lambda failure: None,
        clock: Callable[[], float] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.period_s = period_of(hz)
        self.job_folder = job  # of its run; None: the machine alone
        self.listeners: list[Listener] = list(listeners)
        self.on_failure = on_failure  # given one line about a listener that raised
        self.latest: Sample | None = None
        self._gpus, self._host = gpus, host  # meters are made with the first sample, off the job's own thread
        self._job: JobMeter | None = None
        self._processes: ProcessMeter | None = None
        self._clock, self._wall_clock = clock or steady_s, wall_clock
        self._recent: deque[Sample] = deque(maxlen=max(int(RECENT_S * hz), 2))
        self._last: tuple[float, float] | None = None  # of both clocks
        self._last_job: tuple[float, JobSample] | None = None  # the energy of its GPUs, and the job then
        self._notes: list[str] = []
        self._failed: set[tuple[int, type[BaseException]]] = set()  # who, and what was raised
        self._stop = threading.Event()
        self._was_paused = False
        self._thread: threading.Thread | None = None

    # Threads

    def start(self) -> Sampler:
        """Take the first sample at once and the others in the background; continue after a pause."""
        self._stop.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
            self._thread.start()
        return self

    def pause(self) -> bool:
        """Take no samples until `start`; False if the thread hangs."""
        self._stop.set()
        self._was_paused = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def stop(self) -> None:
        if self.pause() and self._gpus is not None:  # a driver that is in use is not closed
            self._gpus.close()

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        due_s = self._clock()
        while not self._stop.is_set():
            try:
                self.take()
            except Exception as error:  # noqa: BLE001  a meter of ours met what it did not know: the next may do
                self._note_failure(self, error)
            due_s = next_deadline(due_s, self._clock(), self.period_s)
            self._stop.wait(max(due_s - self._clock(), 0.0))

    def recent(self, span_s: float = RECENT_S) -> tuple[Sample, ...]:
        """Return the samples of the last `span_s`, two minutes at most, oldest first."""
        return last_seconds(tuple(self._recent), span_s)

    # Samples

    def take(self) -> Sample:
        """Take one sample and give it to every listener."""
        meter = self._gpus = self._gpus or GpuMeter()
        host = self._host = self._host or HostMeter()
        if self._job is None and self.job_folder is not None:
            self._job = JobMeter(self.job_folder)
        pid = None if self._job is None else self._job.pid
        processes = self._processes = self._processes or ProcessMeter(pid)
        now_s, time_s = self._clock(), self._wall_clock()
        self._note_gap(now_s, time_s)
        gpus = meter.read(now_s, time_s=time_s)
        self._notes += meter.notes
        meter.notes.clear()
        job = self._read_job(meter, gpus, time_s, now_s)
        if not gpus and self._job is not None and self._job.told_gpu is not None:
            gpus = (self._job.told_gpu,)
        sample = Sample(
            time_s=time_s,
            span_s=None if self._last is None else now_s - self._last[0],
            host=host.read(now_s),
            gpus=gpus,
            processes=processes.read(meter.rows, now_s),
            job=job,
            notes=tuple(self._notes),
            missing={} if gpus or meter.refusal is None else {"gpus": meter.refusal},
        )
        self._notes.clear()
        self._last = (now_s, time_s)
        self.latest = sample
        self._recent.append(sample)
        for listener in tuple(self.listeners):  # one of them may take itself off the list
            self._tell(listener, sample)
        return sample

    def _tell(self, listener: Listener, sample: Sample) -> None:
        try:
            listener(sample)
        except (Exception, SystemExit) as error:  # noqa: BLE001  anybody's code: the job and the others go on
            self._note_failure(listener, error)

    def _note_failure(self, whose: object, error: BaseException) -> None:
        """Report a failure once per listener and kind."""
        kind = (id(whose), type(error))
        if kind in self._failed:
            return
        self._failed.add(kind)
        failure = f"{_name_of(whose)} failed: {_words_of(error)}"
        self._notes.append(failure)
        with contextlib.suppress(OSError, ValueError):  # whoever is told may have lost its stream
            self.on_failure(failure)

    def _note_gap(self, now_s: float, time_s: float) -> None:
        was_paused, self._was_paused = self._was_paused, False
        if self._last is None or was_paused:
            return
        passed_s, wall_s = now_s - self._last[0], time_s - self._last[1]
        # Where the steady clock stops while the machine sleeps, a leap of the other may be that sleep.
        if COUNTS_SLEEP and wall_s > passed_s + CLOCK_JUMP_S:
            self._notes.append(f"the clock was set forward by {wall_s - passed_s:.0f} s")
        elif wall_s < passed_s - CLOCK_JUMP_S:
            self._notes.append(f"the clock was set back by {passed_s - wall_s:.0f} s")
        longest_s = passed_s if COUNTS_SLEEP else max(passed_s, wall_s)
        if longest_s > GAP_PERIODS * self.period_s + CLOCK_JUMP_S:
            self._notes.append(f"no samples for {longest_s:.0f} s: this process or the machine was suspended")

    def _read_job(
        self, meter: GpuMeter, gpus: tuple[GpuSample, ...], time_s: float, now_s: float
    ) -> JobSample | None:
        if self._job is None:
            return None
        sample = self._job.read(time_s, now_s)
        visible = meter.visible(self._job.run.visible_devices) if gpus else None
        sample = replace(sample, gpu_index=meter.index_of(self._job.gpu_uuid), visible_gpus=visible)
        return self._with_energy(sample, gpus)

    def _with_energy(self, sample: JobSample, gpus: tuple[GpuSample, ...]) -> JobSample:
        """Add joules per step of the job's GPU, or of all it may use if it does not say which."""
        mine = (sample.visible_gpus or ()) if sample.gpu_index is None else (sample.gpu_index,)
        counted = [gpu.energy_j for gpu in gpus if gpu.index in mine and gpu.mig_index is None]
        energy = [energy_j for energy_j in counted if energy_j is not None]
        if not energy or len(energy) < len(counted) or sample.steps is None:
            self._last_job = None
            return sample
        total_j, before = sum(energy), self._last_job
        if before is not None and before[1].gpu_index == sample.gpu_index and total_j >= before[0]:
            spent_j, steps = total_j - before[0], sample.steps - (before[1].steps or 0)
            rows = (sample.samples or 0) - (before[1].samples or 0)
            if steps <= 0:
                return sample  # the step that is under way is still paying
            per_sample_j = spent_j / rows if rows > 0 else None
            sample = replace(sample, energy_per_step_j=spent_j / steps, energy_per_sample_j=per_sample_j)
        self._last_job = (total_j, sample)
        return sample


def _name_of(listener: object) -> str:
    return getattr(listener, "__qualname__", None) or type(listener).__name__


def _words_of(error: BaseException) -> str:
    """Describe an error in one line; an unexpected one with its type and place."""
    words = " ".join(str(error).split())
    if isinstance(error, (OSError, FlatoutError)):
        return words
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {words} ({last.filename}:{last.lineno})"


def steady_s() -> float:
    """Read a monotonic clock, if possible one that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if COUNTS_SLEEP else time.monotonic()


def period_of(hz: float) -> float:
    """Return the seconds between two samples; raise BadInput for a rate out of range."""
    if not LOWEST_HZ <= hz <= HIGHEST_HZ:
        raise BadInput(
            f"{hz} samples per second are out of range", hint=f"choose from {LOWEST_HZ} to {HIGHEST_HZ:g}"
        )
    return 1.0 / hz


def next_deadline(due_s: float, now_s: float, period_s: float) -> float:
    """Return the next time on the grid that lies ahead."""
    due_s += period_s
    if due_s > now_s:
        return due_s
    missed = int((now_s - due_s) / period_s) + 1
    return due_s + missed * period_s
