"""The live line: one line that says how the machine and the job do, under any job's own output.

    GPU 8.2/15.8 GiB (52 %) | util 85 % | CPU 45 % | RAM 67 % | loss 0.3245 | lr 5.2e-05 | 12.3 it/s

On a terminal it stands below what the job prints (standing_line.py).  Elsewhere (a log file, a notebook,
above bars of rich) it is a plain line once a minute.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from flatout.ground.units import UNKNOWN, show_share
from flatout.monitor.sample import GpuSample, Sample, merge, show_loss
from flatout.monitor.terminal.standing_line import StandingLine, is_writable, terminal_size

GIB = 2**30
PLAIN_EVERY_S = 60.0


def live_line(samples: Sequence[Sample]) -> str:
    """Draw the line; what the last sample does not know comes from earlier ones."""
    sample = merge(samples)
    latest = samples[-1]
    # A share of CPU time lies between two readings: before the second there is none to be missing.
    cpu = [] if sample.span_s is None else [f"CPU {show_share(sample.host.cpu_share)}"]
    return " | ".join([*_gpu_parts(latest), *cpu, _ram(latest), *_job(sample)])


def _gpu_parts(sample: Sample) -> list[str]:
    if not sample.gpus:
        return []
    gpu = sample.job_gpu
    if gpu is not None:
        return _one_gpu(gpu)
    if len(sample.gpus) == 1:
        return _one_gpu(sample.gpus[0])
    return [part for each in sample.gpus for part in _one_gpu(each, number=f" {each.index}")[:1]]


def _one_gpu(gpu: GpuSample, *, number: str = "") -> list[str]:
    if gpu.lost:
        return [f"GPU{number} lost"]
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is None or not total:
        memory = f"GPU{number} {UNKNOWN}"
    else:
        memory = f"GPU{number} {used / GIB:.1f}/{total / GIB:.1f} GiB ({show_share(used / total)})"
    activity = [f"util {show_share(gpu.utilisation_share)}"]
    if gpu.sm_active_share is not None:
        activity.append(f"SM {show_share(gpu.sm_active_share)}")
    return [memory, *activity]


def _ram(sample: Sample) -> str:
    used, total = sample.host.memory_used_bytes, sample.host.memory_total_bytes
    return f"RAM {show_share(used / total if used is not None and total else None)}"


def _job(sample: Sample) -> list[str]:
    job = sample.job
    if job is None:
        return []
    parts = []
    if job.loss is not None:
        parts.append(f"LOSS IS {show_loss(job.loss)}" if job.has_bad_loss else f"loss {show_loss(job.loss)}")
    if job.learning_rate is not None:
        parts.append(f"lr {job.learning_rate:.2g}")
    rate = job.steps_per_s
    if rate is not None:  # a job that has not come to its steps, or reports none, has no rate to be missing
        parts.append(f"{rate:.3g} it/s" if rate >= 1 else f"{1 / rate:.3g} s/it")
    if job.state != "running":
        parts.append(job.state)
    return parts


class LineWriter:
    """Writes the live line to a stream, by default to stderr as it is at that moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._began_at_s: float | None = None
        self._written_at_s: float | None = None
        self._standing = StandingLine()

    @property
    def _target(self) -> TextIO:
        return self._stream or sys.stderr

    def listen(self) -> None:
        """Listen to what the job writes, before there is a line."""
        if is_writable(self._target) and _is_terminal(self._target):
            self._standing.listen(self._target)

    def write(self, samples: Sequence[Sample]) -> None:
        stream = self._target
        if not is_writable(stream):
            return
        if _is_terminal(stream):
            columns = terminal_size(stream).columns or shutil.get_terminal_size().columns
            self._standing.show(stream, live_line(samples)[: max(columns - 3, 1)])
        else:
            self._standing.close(leaves_line=False)
            self._write_plain(stream, samples)

    def _write_plain(self, stream: TextIO, samples: Sequence[Sample]) -> None:
        time_s = samples[-1].time_s
        if self._began_at_s is None:
            self._began_at_s = time_s
        since_s = self._began_at_s if self._written_at_s is None else self._written_at_s
        is_first_rate = self._written_at_s is None and _has_rates(samples)
        if is_first_rate or time_s - since_s >= PLAIN_EVERY_S:
            self._written_at_s = time_s
            stream.write(f"{live_line(samples)}\n")
            stream.flush()

    def say(self, message: str) -> None:
        """Print a line above the live line and the job's bars."""
        if is_writable(self._target):
            self._standing.say(self._target, message)

    def close(self) -> None:
        self._standing.close()


def _is_terminal(stream: TextIO) -> bool:
    """Return whether to draw in place: not on rich's stand-in for stderr, which prints whole lines."""
    return getattr(stream, "isatty", bool)() and not hasattr(stream, "rich_proxied_file")


def _has_rates(samples: Sequence[Sample]) -> bool:
    """Return whether the machine's shares and the job's rate are known."""
    sample = merge(samples)
    return sample.span_s is not None and (sample.job is None or sample.job.steps_per_s is not None)
