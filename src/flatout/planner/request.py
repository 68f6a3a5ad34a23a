"""What a plan asks the memory room for: one job on one device, and where its stored traces are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.hardware.device import Device
from flatout.planner.progress import silent

if TYPE_CHECKING:
    from flatout.planner.documents import Value
    from flatout.planner.stored import TraceStore
    from flatout.planner.traced import TracedForecast


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRequest:
    """The job and the device that memory is to be forecast for."""

    model: str  # as `--model` takes it
    device: Device
    values: Mapping[str, Value]  # the merged config of the first stage, by dotted key
    overrides: Mapping[str, Value]  # what `--set` gave, also part of `values`
    optimizer: str | None = None
    ranks: int = 1
    profile: bool = False
    task: str | None = None  # of a Hugging Face config folder whose architectures name no head
    make_batch: str | None = None  # of a LightningModule that brings none
    configs: tuple[Path, ...] = ()  # the files that `values` come from
    keys_of: Callable[[Iterable[str]], frozenset[str]] | None = None  # of knobs and sizes, in `values`
    cache: bool = True
    on_progress: Callable[[str], None] = silent
    on_traces: Callable[[int], None] | None = None  # called with how many are about to be made


def load_forecast(request: ForecastRequest) -> TracedForecast:
    """The memory room behind a plan."""
    from flatout.memory.sources import load_job
    from flatout.planner.traced import TracedForecast, nested, with_optimizer

    job, _recipe = load_job(
        request.model, settings=nested(request.values), make_batch=request.make_batch, task=request.task
    )
    return TracedForecast(
        with_optimizer(job, request.optimizer, on_progress=request.on_progress),
        device=request.device,
        ranks=request.ranks,
        profile=request.profile,
        store=_trace_store(request, size_names=tuple(job.sizes)) if request.cache else None,
        on_progress=request.on_progress,
        on_traces=request.on_traces,
    )


def _trace_store(request: ForecastRequest, *, size_names: Sequence[str]) -> TraceStore | None:
    from flatout.planner.fingerprint import fingerprint
    from flatout.planner.mapping import PLANNED
    from flatout.planner.stored import TraceStore

    identity = fingerprint(
        request.model,
        settings=request.values,
        varied=request.keys_of([*PLANNED, *size_names]) if request.keys_of else (),
        configs=request.configs,
        options={
            "optimizer": request.optimizer,
            "task": request.task,
            "make_batch": request.make_batch,
        },
    )
    return None if identity is None else TraceStore(identity)
