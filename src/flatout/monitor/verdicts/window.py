"""What a verdict is, and the window of samples it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flatout.ground.codec import encode
from flatout.monitor.sample import GpuSample, JobSample, Sample

Bound = Literal[
    "diverged",
    "memory",
    "stalled",
    "throttled",
    "data",
    "transfer",
    "host",
    "idle-gpu",
    "compute",
    "healthy",
    "unknown",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the run is bound by."""

    bound: Bound
    sentence: str  # what bounds it, with its figure
    action: str  # what to do next
    evidence: tuple[str, ...] = ()  # the figures it rests on
    rules: tuple[str, ...] = ()  # codes of the doctor's rules that find the cause
    missing: tuple[str, ...] = ()  # what would have to be known to say more

    def __str__(self) -> str:
        return f"{self.sentence}; {self.action}"

    def to_json(self) -> dict[str, Any]:
        return {"format": "flatout-verdict", "version": 1, **encode(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The last minute: its samples, and all of them merged."""

    samples: tuple[Sample, ...]
    mean: Sample

    @property
    def job(self) -> JobSample | None:
        return self.mean.job

    @property
    def gpu(self) -> GpuSample | None:
        """The GPU the job computes on, if it answers."""
        gpu = self.mean.job_gpu
        return None if gpu is None or gpu.lost else gpu
