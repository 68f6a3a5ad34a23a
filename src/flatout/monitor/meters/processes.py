"""Processes: those that hold a context on a GPU, and those of the job.

NVML numbers processes as the host does.  Inside a container the same number may be another process, so what
the operating system knows under a number is believed only where both give it the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil

from flatout.hardware.nvml_questions import Questions, text_of
from flatout.monitor.sample import ProcessSample

MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """What NVML says of one process on one GPU."""

    pid: int
    gpu_index: int
    mig_index: int | None
    name: str | None
    memory_bytes: int | None
    sm_share: float | None


def rows_of(
    questions: Questions, gpu_index: int, mig_index: int | None, *, since_us: int
) -> Iterable[GpuRow]:
    """The processes of one GPU; none where NVML does not tell."""
    used: dict[int, int | None] = {}
    for kind in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in questions.ask((), (kind,)) or ():
            known = [size for size in (used.get(process.pid), process.usedGpuMemory) if size is not None]
            used[process.pid] = max(known, default=None)
    busy: dict[int, list[int]] = {}
    asks_shares = bool(used) and mig_index is None
    for sample in (
        (questions.ask((), ("nvmlDeviceGetProcessUtilization", since_us)) or ()) if asks_shares else ()
    ):
        if sample.timeStamp > since_us:
            busy.setdefault(sample.pid, []).append(sample.smUtil)
    system = Questions(questions.nvml)
    for pid, memory_bytes in used.items():
        shares = busy.get(pid)
        yield GpuRow(
            pid=pid,
            gpu_index=gpu_index,
            mig_index=mig_index,
            name=text_of(system.ask((), ("nvmlSystemGetProcessName", pid))) or None,
            memory_bytes=memory_bytes,
            sm_share=sum(shares) / len(shares) / 100 if shares else None,
        )


class ProcessMeter:
    """Joins NVML's rows with what the operating system knows; `job_pid` and its children are the job."""

    def __init__(self, job_pid: int | None = None) -> None:
        self.job_pid = job_pid
        self._known: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, tuple[float, float]] = {}  # pid -> at which second, CPU seconds used

    def read(self, gpu_rows: Iterable[GpuRow], now_s: float) -> tuple[ProcessSample, ...]:
        job = {} if self.job_pid is None else dict.fromkeys((self.job_pid, *children(self.job_pid)))
        rows = sorted(gpu_rows, key=lambda row: -(row.memory_bytes or 0))[:MOST_ROWS]
        on_gpu = {row.pid for row in rows}
        facts = {
            pid: self._facts(pid, name, now_s)
            for pid, name in ({row.pid: row.name or "" for row in rows} | job).items()
        }
        self._forget(facts)
        samples = [
            ProcessSample(
                pid=row.pid,
                gpu_index=row.gpu_index,
                mig_index=row.mig_index,
                name=_base(row.name) or facts[row.pid].name,
                of_job=row.pid in job,
                gpu_memory_bytes=row.memory_bytes,
                sm_share=row.sm_share,
                cpu_cores=facts[row.pid].cpu_cores,
                memory_bytes=facts[row.pid].memory_bytes,
            )
            for row in rows
        ]
        samples += [
            ProcessSample(
                pid=pid,
                name=facts[pid].name,
                of_job=True,
                cpu_cores=facts[pid].cpu_cores,
                memory_bytes=facts[pid].memory_bytes,
            )
            for pid in job
            if pid not in on_gpu and facts[pid].name is not None
        ]
        return tuple(samples[:MOST_ROWS])

    def _facts(self, pid: int, name: str | None, now_s: float) -> _Facts:
        """`name` is NVML's, or None where the number is the operating system's own."""
        try:
            process = self._known.get(pid) or psutil.Process(pid)
            self._known[pid] = process
            with process.oneshot():
                own = process.name()
                if name is not None and not _is_same(process, name, own):
                    return _Facts()
                times = process.cpu_times()
                memory_bytes = process.memory_info().rss
        except psutil.Error:
            self._known.pop(pid, None)
            return _Facts()
        used_s = times.user + times.system
        before, self._cpu_s[pid] = self._cpu_s.get(pid), (now_s, used_s)
        if before is None or now_s <= before[0]:
            return _Facts(name=own, memory_bytes=memory_bytes)
        cores = max(used_s - before[1], 0.0) / (now_s - before[0])
        return _Facts(name=own, memory_bytes=memory_bytes, cpu_cores=cores)

    def _forget(self, present: Iterable[int]) -> None:
        kept = set(present)
        self._known = {pid: process for pid, process in self._known.items() if pid in kept}
        self._cpu_s = {pid: used for pid, used in self._cpu_s.items() if pid in kept}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    name: str | None = None
    cpu_cores: float | None = None
    memory_bytes: int | None = None


def children(pid: int, root: Path = Path("/")) -> list[int]:
    """What the main thread of a process started, its loader workers; none where the kernel has no list."""
    try:
        text = (root / "proc" / str(pid) / "task" / str(pid) / "children").read_text(encoding="utf-8")
    except OSError:
        return []
    return [int(number) for number in text.split() if number.isdigit()][:MOST_ROWS]


def _base(name: str | None) -> str | None:
    return PurePath(name).name if name else None


def _is_same(process: psutil.Process, nvml_name: str, own: str) -> bool:
    wanted = _base(nvml_name)
    if wanted == own:
        return True
    command = process.cmdline()
    return bool(command) and _base(command[0]) == wanted
