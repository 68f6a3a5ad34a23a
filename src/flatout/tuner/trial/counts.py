"""Count what a few steps ask of the machine: the same on a fast machine and on a slow one.

Launches are kernels on a GPU and outermost operators on a CPU.  A wait is the host waiting for the GPU; on a
CPU it is a tensor read into Python, which would wait on a GPU.  Counts of a job that computes the same are
equal from run to run, so one run is enough, and a busy machine does not change them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.measure.evidence import Copy

READS = "aten::_local_scalar_dense"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Per step, except graph breaks, recompilations and groups, which are for the whole job."""

    launches: float
    waits: float
    copied_bytes: float | None  # between host and GPU; None without a GPU, or if the profiler does not say
    peak_bytes: int  # on a CPU without what was allocated before these steps
    parameter_groups: int
    graph_breaks: int
    recompilations: int


class Counter:
    """Counts from `start` to `stop`."""

    def __init__(self, *, cuda: bool) -> None:
        from flatout.measure.device.recording import Recording  # not at the top: it imports numpy

        self._cuda = cuda
        self._recording = Recording(cpu=not cuda, cuda=cuda, with_memory=not cuda)
        self.groups: dict[int, int] = {}  # of each optimizer

    def start(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(RuntimeError):  # stop() reports it
            self._recording.start()

    def stop(self, num_steps: int) -> Counts | None:
        """Return the counts; None if the job has a profiler of its own."""
        try:
            events = self._recording.stop()
        except RuntimeError:
            return None
        launches, waits, copied, peak = (
            self._of_gpu(events, num_steps) if self._cuda else _of_cpu(events, num_steps)
        )
        breaks, recompilations = _of_dynamo()
        return Counts(
            launches=launches,
            waits=waits,
            copied_bytes=copied,
            peak_bytes=peak,
            parameter_groups=sum(self.groups.values()),
            graph_breaks=breaks,
            recompilations=recompilations,
        )

    def _of_gpu(self, events: list[Any], num_steps: int) -> tuple[float, float, float | None, int]:
        import torch

        from flatout.measure.device.kernels import device_timelines, summarise_device

        device, host = device_timelines(events)
        recording = self._recording
        in_steps = (host.start_ns >= recording.start_ns) & (host.start_ns < recording.stop_ns)
        found = summarise_device(
            device,
            host.only(in_steps),
            window_ns=recording.end_ns - recording.start_ns,
            num_steps=num_steps,
            step_s=0.0,
            has_optimizer=True,
        )
        return (
            found.num_kernels,
            found.num_syncs or 0.0,
            copied_bytes(found.copies),
            torch.cuda.max_memory_allocated(),
        )


def copied_bytes(copies: Sequence[Copy]) -> float | None:
    """Return the bytes per step between host and GPU; None if a size is unknown."""
    found = [each.bytes_per_step for each in copies if each.kind.startswith(("HtoD", "DtoH"))]
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def _of_cpu(events: list[Any], num_steps: int) -> tuple[float, float, None, int]:
    from flatout.measure.device.operators import operator_rows

    rows = operator_rows(events)
    launches = sum(row.outermost for row in rows) / num_steps
    waits = sum(row.name == READS for row in rows) / num_steps
    now = peak = 0
    for _, change in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        now += change
        peak = max(peak, now)
    return launches, waits, None, peak


def _of_dynamo() -> tuple[int, int]:
    """Return the graph breaks and recompilations so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    again = sum(record.recompile_reason is not None for record in dynamo._compilation_metrics)
    return len(dynamo.graph_break_reasons), again
