"""Processes: those that hold a context on a GPU, and those of the job.

NVML numbers processes as the host does.  Inside a container the same number may be another process, so what
the operating system knows under a number is believed only where both give it the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import psutil

from flatout.hardware.nvml_questions import Questions, running_processes
from flatout.monitor.sample import ProcessSample

MOST_ROWS = 64


def processes_of_gpu(
    questions: Questions, gpu_index: int, mig_index: int | None, *, since_us: int
) -> Iterator[ProcessSample]:
    """Yield what NVML says about the processes of one GPU."""
    running = running_processes(questions) or ()
    busy: dict[int, list[int]] = {}
    if running and mig_index is None:
        for sample in questions.ask((), ("nvmlDeviceGetProcessUtilization", since_us)) or ():
            if sample.timeStamp > since_us:
                busy.setdefault(sample.pid, []).append(sample.smUtil)
    for process in running:
        shares = busy.get(process.pid)
        yield ProcessSample(
            pid=process.pid,
            gpu_index=gpu_index,
            mig_index=mig_index,
            name=process.name or None,
            gpu_memory_bytes=process.used_bytes,
            sm_share=sum(shares) / len(shares) / 100 if shares else None,
        )


class ProcessMeter:
    """Joins NVML's rows with what the operating system knows; `job_pid` and its children are the job."""

    def __init__(self, job_pid: int | None = None) -> None:
        self.job_pid = job_pid
        self._known: dict[int, psutil.Process] = {}
        self._cpu_s: dict[int, tuple[float, float]] = {}  # pid -> at which second, CPU seconds used

    def read(self, on_gpus: Iterable[ProcessSample], now_s: float) -> tuple[ProcessSample, ...]:
        job = {} if self.job_pid is None else dict.fromkeys((self.job_pid, *children(self.job_pid)))
        rows = sorted(on_gpus, key=lambda row: -(row.gpu_memory_bytes or 0))[:MOST_ROWS]
        named: dict[int, str | None] = {row.pid: row.name or "" for row in rows} | job
        facts = {pid: self._facts(pid, name, now_s) for pid, name in named.items()}
        self._forget(facts)
        samples = []
        for row in rows:
            own = facts[row.pid]
            figures = {**own, "name": _base(row.name) or own.get("name")}
            samples.append(replace(row, of_job=row.pid in job, **figures))
        rest = job.keys() - {row.pid for row in rows}
        samples += [
            ProcessSample(pid=pid, of_job=True, **facts[pid]) for pid in job if pid in rest and facts[pid]
        ]
        return tuple(samples[:MOST_ROWS])

    def _facts(self, pid: int, name: str | None, now_s: float) -> dict[str, Any]:
        """Return fields of a ProcessSample; `name` is NVML's, None if the pid is the operating system's."""
        try:
            process = self._known.get(pid) or psutil.Process(pid)
            self._known[pid] = process
            with process.oneshot():
                own = process.name()
                if name is not None and not _is_same(process, name, own):
                    return {}
                times = process.cpu_times()
                facts: dict[str, Any] = {"name": own, "memory_bytes": process.memory_info().rss}
        except psutil.Error:
            self._known.pop(pid, None)
            return {}
        used_s = times.user + times.system
        before, self._cpu_s[pid] = self._cpu_s.get(pid), (now_s, used_s)
        if before is not None and now_s > before[0]:
            facts["cpu_cores"] = max(used_s - before[1], 0.0) / (now_s - before[0])
        return facts

    def _forget(self, present: Iterable[int]) -> None:
        kept = set(present)
        self._known = {pid: process for pid, process in self._known.items() if pid in kept}
        self._cpu_s = {pid: used for pid, used in self._cpu_s.items() if pid in kept}


def children(pid: int, root: Path = Path("/")) -> list[int]:
    """List the children of a process's main thread, such as loader workers, if the kernel lists them."""
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
