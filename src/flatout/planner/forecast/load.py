"""What a plan asks the memory room for: one job on one device, and where its stored traces are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.decisions import Decision
from flatout.hardware.device import Device
from flatout.planner.fit.progress import silent
from flatout.planner.forecast.segments import find_segments

if TYPE_CHECKING:
    from flatout.memory.jobs.job import Job
    from flatout.planner.config.documents import Value
    from flatout.planner.forecast.trace_cache import TraceStore
    from flatout.planner.forecast.traced import TracedForecast


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRequest:
    """The job and the device that memory is to be forecast for."""

    model: str  # as `--model` takes it
    device: Device
    values: Mapping[str, Value]  # the merged config of the first stage, by dotted key
    stages: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # the same of every stage
    overrides: Mapping[str, Value] = field(default_factory=dict)  # what `--set` gave, also part of `values`
    optimizer: str | None = None
    ranks: int = 1
    profile: bool = False
    native: bool = False  # traced on the GPU that is here
    expandable_segments: bool | None = None  # None: as the environment sets the allocator
    task: str | None = None  # of a Hugging Face config folder whose architectures name no head
    make_batch: str | None = None  # of a LightningModule that brings none
    configs: tuple[Path, ...] = ()  # the files that `values` come from
    keys_of: Callable[[Iterable[str]], frozenset[str]] | None = None  # of knobs and sizes, in `values`
    cache: bool = True
    on_progress: Callable[[str], None] = silent
    on_traces: Callable[[int], None] | None = None  # called with how many are about to be made

    @property
    def segments(self) -> Decision[bool]:
        """Whether the segments of the job's allocator are expandable."""
        return find_segments(self.expandable_segments, profile=self.profile)


def load_forecast(request: ForecastRequest) -> TracedForecast:
    """The memory room behind a plan; a stage whose settings make another model has a forecast of its own."""
    job = _job(request, request.values)
    found = _forecast(request, job, request.values)
    differing = _differing(request, job)
    forecasts = {describe(job): found} if differing else {}
    for name in differing:
        other = _job(request, request.stages[name])
        described = describe(other)
        if described not in forecasts:
            request.on_progress(f"{name} trains another model than {next(iter(request.stages))}")
            forecasts[described] = _forecast(request, other, request.stages[name])
        if forecasts[described] is not found:
            found.set_stage(name, forecasts[described])
    return found


def describe(job: Job) -> str:
    """What a model is made of, from a copy without data: another text is another model."""
    from flatout.memory.process.child import run_in_child

    return run_in_child(_described, job)


def _described(job: Job) -> str:
    import torch

    with torch.device("meta"):
        model = job.make_model()
    parameters = [
        f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"
        for name, value in model.named_parameters()
    ]
    return "\n".join([repr(model), *parameters])


def _differing(request: ForecastRequest, job: Job) -> list[str]:
    """Stages that differ from the first in more than what a plan varies."""
    varied = _varied(request, job)

    def rest(values: Mapping[str, Value]) -> dict[str, Value]:
        return {key: value for key, value in values.items() if key not in varied}

    return [name for name, values in request.stages.items() if rest(values) != rest(request.values)]


def _varied(request: ForecastRequest, job: Job) -> frozenset[str]:
    from flatout.planner.config.knobs import PLANNED

    return request.keys_of([*PLANNED, *job.sizes]) if request.keys_of else frozenset()


def _job(request: ForecastRequest, values: Mapping[str, Value]) -> Job:
    from flatout.memory.jobs.from_name import load_job
    from flatout.planner.forecast.traced import nested, with_optimizer

    job, _recipe = load_job(
        request.model, settings=nested(values), make_batch=request.make_batch, task=request.task
    )
    return with_optimizer(job, request.optimizer, on_progress=request.on_progress)


def _forecast(request: ForecastRequest, job: Job, values: Mapping[str, Value]) -> TracedForecast:
    from flatout.planner.forecast.traced import TracedForecast

    return TracedForecast(
        job,
        device=request.device,
        ranks=request.ranks,
        profile=request.profile,
        native=request.native,
        expandable_segments=request.segments.value,
        store=_trace_store(request, job, values) if request.cache else None,
        on_progress=request.on_progress,
        on_traces=request.on_traces,
    )


def _trace_store(request: ForecastRequest, job: Job, values: Mapping[str, Value]) -> TraceStore | None:
    from flatout.planner.forecast.fingerprint import fingerprint
    from flatout.planner.forecast.trace_cache import TraceStore

    options = {"optimizer": request.optimizer, "task": request.task, "make_batch": request.make_batch}
    identity = fingerprint(
        request.model,
        settings=values,
        varied=_varied(request, job),
        configs=request.configs,
        options=options,
    )
    return None if identity is None else TraceStore(identity)
