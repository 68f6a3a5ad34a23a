"""A Sample as a flat list of numbers: what every sink writes, each in its own format.

A figure keeps the name of its field, and the group it belongs to: the host, the job, or one GPU.  Unknown
figures are listed too, so that a table has the same columns from its first line to its last.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.measure import PHASES
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample

PHASE_FIELDS = ("phases", "device_phases")
IDENTITIES = ("index", "mig_index", "pid", "rank", "world_size", "gpu_index")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a sample."""

    group: str  # "host", "job" or "gpu"
    name: str  # the field's name; of phases "phases/wait"
    value: float | None
    gpu: str | None = None  # "0", or "0.1" for instance 1 of GPU 0

    @property
    def path(self) -> str:
        return "/".join(part for part in (self.group, self.gpu, self.name) if part is not None)


def figures(sample: Sample) -> Iterator[Figure]:
    """Yield every number of the host, the job and the GPUs."""
    yield from _of("host", HostSample, sample.host)
    yield from _of("job", JobSample, sample.job)
    for gpu in sample.gpus:
        yield from _of("gpu", GpuSample, gpu, gpu=gpu.label)


def _of(group: str, shape: type, row: Any, *, gpu: str | None = None) -> Iterator[Figure]:
    for field in _numbers(shape):
        yield Figure(group=group, name=field, value=None if row is None else getattr(row, field), gpu=gpu)
    for field in PHASE_FIELDS if shape is JobSample else ():
        shares = (None if row is None else getattr(row, field)) or {}
        for phase in PHASES:
            yield Figure(group=group, name=f"{field}/{phase}", value=shares.get(phase), gpu=gpu)


@functools.cache
def _numbers(shape: type) -> tuple[str, ...]:
    return tuple(
        field
        for field, hint in typing.get_type_hints(shape).items()
        if field not in IDENTITIES and {int, float} & set(typing.get_args(hint))
    )
