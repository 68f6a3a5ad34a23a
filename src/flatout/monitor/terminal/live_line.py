"""The live line: one line that says how the machine and the job do, under any job's own output.

    GPU 8.2/15.8 GiB (52 %) | util 85 % | CPU 45 % | RAM 67 % | loss 0.3245 | lr 5.2e-05 | 12.3 it/s

On a terminal it is rewritten in place, below what the job prints.  While the job draws bars with tqdm, the
line is one more of tqdm's own bars: tqdm then moves the cursor for all of them, and none is broken.
Elsewhere (a log file, a notebook, above bars of rich) it is a plain line once a minute.

A print that comes while the live line stands would be appended to it.  So the line is wiped just before the
job's text arrives, and it is not drawn over a line that the job has begun and not ended.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from flatout.ground.units import UNKNOWN, show_share
from flatout.monitor.sample import GpuSample, Sample, merge, show_loss

GIB = 2**30
PLAIN_EVERY_S = 60.0
CLEAR_LINE = "\r\x1b[K"
CLEAR_BELOW = "\r\x1b[J"

Write = Callable[[str], int]


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


class JobOutput:
    """Hears what is written to some streams; `wipe` is called, under `lock`, before the text goes out.

    The streams stay the objects they are: only their `write` is stood in for, and given back at the end.
    """

    def __init__(self, wipe: Callable[[], None]) -> None:
        self.lock = threading.RLock()  # a signal's handler may print in the middle of a print
        self.is_mid_line = False
        self._wipe = wipe
        self._pid = os.getpid()
        self._heard: list[tuple[TextIO, Write, Write]] = []  # with its own write, and what stands in for it

    def hear(self, stream: TextIO | None) -> None:
        """Stand in for the `write` of a terminal, once; leave alone a stream that takes no attribute."""
        attributes = getattr(stream, "__dict__", None)
        if stream is None or attributes is None or not getattr(stream, "isatty", bool)():
            return
        if any(stream is known for known, _, _ in self._heard):
            return
        own = stream.write

        def write(text: str) -> int:
            if os.getpid() != self._pid:  # forked: whoever held the lock is not in this process
                return own(text)
            with self.lock:
                if text:
                    self._wipe()
                    self.is_mid_line = not text.endswith("\n") and "\r" not in text
                return own(text)

        attributes["write"] = write
        self._heard.append((stream, own, write))

    def write_unheard(self, stream: TextIO, text: str) -> None:
        """Write past our own stand-in, as the live line does."""
        own = next((own for known, own, _ in self._heard if known is stream), stream.write)
        own(text)
        stream.flush()

    def close(self) -> None:
        for stream, _, write in self._heard:
            if stream.__dict__.get("write") is write:  # who stood in for it later keeps what he has
                del stream.__dict__["write"]
        self._heard.clear()


class LineWriter:
    """Writes the live line to a stream, by default to stderr as it is at that moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._began_at_s: float | None = None
        self._written_at_s: float | None = None
        self._bar: Any = None
        self._open_on: TextIO | None = None  # where a line without its end stands
        self._job_output = JobOutput(self._wipe)

    def write(self, samples: Sequence[Sample]) -> None:
        stream = self._stream or sys.stderr
        if not is_writable(stream):
            return
        if not _is_terminal(stream):
            self._write_plain(stream, samples)
            return
        line = live_line(samples)[: max(_columns(stream) - 3, 1)]
        tqdm = _tqdm_in_use(self._bar)
        if tqdm is None:
            self._leave_bars(stream)
        elif self._bar is None:
            self._join_bars(tqdm, stream)
        if self._bar is not None:
            self._bar.set_description_str(line)
            return
        for each in (stream, sys.stdout):
            self._job_output.hear(each)
        with self._job_output.lock:
            if not self._job_output.is_mid_line:
                # What others write, such as a library in C, is appended: two spaces keep it apart.
                self._put(stream, f"{CLEAR_LINE}{line}  ")
                self._open_on = stream

    def _put(self, stream: TextIO, text: str) -> None:
        self._job_output.write_unheard(stream, text)

    def _wipe(self) -> None:
        stream, self._open_on = self._open_on, None
        if stream is not None and is_writable(stream):
            self._put(stream, CLEAR_LINE)

    def _join_bars(self, tqdm: Any, stream: TextIO) -> None:
        if self._open_on is not None:
            with tqdm.external_write_mode(file=stream), self._job_output.lock:
                self._wipe()
        # Neither a total nor a bar: only the text, on a line that tqdm keeps free for it.
        self._bar = tqdm(bar_format="{desc}", leave=False, file=stream, dynamic_ncols=True)

    def _leave_bars(self, stream: TextIO) -> None:
        """Leave tqdm after the job's bars are gone, because tqdm counts our line from theirs."""
        if self._bar is None:
            return
        bar, self._bar = self._bar, None
        bar.pos = 0
        bar.close()
        self._put(stream, CLEAR_BELOW)

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
        stream = self._stream or sys.stderr
        if not is_writable(stream):
            return
        if self._bar is not None:
            self._bar.write(message, file=stream)
            return
        with self._job_output.lock:
            self._wipe()
            self._put(stream, f"{message}\n")

    def _end_line(self, stream: TextIO) -> None:
        with self._job_output.lock:
            if self._open_on is not None:
                self._put(stream, "\n")
                self._open_on = None

    def close(self) -> None:
        stream = self._stream or sys.stderr
        if self._bar is not None and is_writable(stream) and _tqdm_in_use(self._bar) is None:
            self._leave_bars(stream)
        elif self._bar is not None:
            self._bar.close()
            self._bar = None
        if is_writable(stream):
            self._end_line(stream)
        self._job_output.close()


def _is_terminal(stream: TextIO) -> bool:
    """Whether to draw in place: not on rich's stand-in for stderr, which prints whole lines."""
    return getattr(stream, "isatty", bool)() and not hasattr(stream, "rich_proxied_file")


def is_writable(stream: TextIO | None) -> bool:
    """Whether a stream is there and open: a job may close its stderr."""
    return stream is not None and not getattr(stream, "closed", False)


def _has_rates(samples: Sequence[Sample]) -> bool:
    """Whether the machine's shares and the job's rate are known."""
    sample = merge(samples)
    return sample.span_s is not None and (sample.job is None or sample.job.steps_per_s is not None)


def _columns(stream: TextIO) -> int:
    """Return the width of the terminal behind `stream`; stdout may go to a file."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def _tqdm_in_use(own_bar: Any) -> Any:
    """Return the job's tqdm while it draws a bar other than ours, else None."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    num_bars = len(getattr(tqdm, "_instances", ()))
    return tqdm if num_bars > (own_bar is not None) else None
