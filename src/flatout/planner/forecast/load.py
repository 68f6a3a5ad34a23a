"""The forecast behind a plan: a job and a device named on the command line, and the cache of its traces.

PyTorch reads how its allocator is set from the environment of the job: `PYTORCH_ALLOC_CONF`, or where that is
not set `PYTORCH_CUDA_ALLOC_CONF`.  A plan reads them in its own environment, unless a flag says otherwise,
and reports what it used, because the job may run elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.ground import OnProgress, ignore
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.hardware.device import Device
from flatout.memory.jobs.from_name import load_job
from flatout.memory.jobs.job import Job, adamw, optimizer_named
from flatout.memory.predict.allocator import expandable_segments_of
from flatout.memory.predict.forecast import Forecaster
from flatout.memory.process.isolated_process import run_in_child
from flatout.planner.config.knobs import PLANNED
from flatout.planner.forecast.trace_cache import TraceCache, fingerprint

if TYPE_CHECKING:
    from flatout.planner.config.config_text import Value


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastOptions:
    """How the job of a forecast is made and traced."""

    task: str | None = None  # of a Hugging Face config folder whose architectures name no head
    make_batch: str | None = None  # of a LightningModule that brings none
    profile: bool = False
    native: bool = False  # traced on the GPU that is here
    expandable_segments: bool | None = None  # None: as the environment sets the allocator
    cache: bool = True  # of traces, in a folder of the user's


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRequest(ForecastOptions):
    """The job and the device of a forecast."""

    model: str  # as `--model` takes it
    device: Device
    values: Mapping[str, Value]  # the merged config of the first stage, by dotted key
    stages: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)  # the same of every stage
    overrides: Mapping[str, Value] = field(default_factory=dict)  # what `--set` gave, also part of `values`
    optimizer: str | None = None
    ranks: int = 1
    configs: tuple[Path, ...] = ()  # the files that `values` come from
    keys_of: Callable[[Iterable[str]], frozenset[str]] | None = None  # of knobs and sizes, in `values`
    on_progress: OnProgress = ignore
    on_traces: Callable[[int], None] = lambda num_traces: None  # called with how many are about to be made

    @property
    def segments(self) -> Decision[bool]:
        """Whether the segments of the job's allocator are expandable."""
        return find_segments(self.expandable_segments, profile=self.profile)


def load_forecast(request: ForecastRequest) -> Forecaster:
    """Load the forecast of a plan; a stage that trains another model gets its own."""
    job = _job(request, request.values)
    found = _forecast(request, job, request.values)
    differing = _find_differing(request, job)
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
    """Describe a model, from a copy without data; another text is another model."""
    return run_in_child(_describe_model, job)


def _describe_model(job: Job) -> str:
    import torch

    with torch.device("meta"):
        model = job.make_model()
    parameters = [
        f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad}"
        for name, value in model.named_parameters()
    ]
    return "\n".join([repr(model), *parameters])


def _find_differing(request: ForecastRequest, job: Job) -> list[str]:
    """Return the stages that differ from the first in more than a plan varies."""
    varied = _varied_keys(request, job)

    def rest(values: Mapping[str, Value]) -> dict[str, Value]:
        return {key: value for key, value in values.items() if key not in varied}

    return [name for name, values in request.stages.items() if rest(values) != rest(request.values)]


def _varied_keys(request: ForecastRequest, job: Job) -> frozenset[str]:
    return request.keys_of([*PLANNED, *job.sizes]) if request.keys_of else frozenset()


def _job(request: ForecastRequest, values: Mapping[str, Value]) -> Job:
    job, _recipe = load_job(
        request.model, settings=nest_keys(values), make_batch=request.make_batch, task=request.task
    )
    return with_optimizer(job, request.optimizer, on_progress=request.on_progress)


def _forecast(request: ForecastRequest, job: Job, values: Mapping[str, Value]) -> Forecaster:
    return Forecaster(
        job,
        device=request.device,
        ranks=request.ranks,
        profile=request.profile,
        native=request.native,
        expandable_segments=request.segments.value,
        store=_trace_cache(request, job, values) if request.cache else None,
        on_progress=request.on_progress,
        on_traces=request.on_traces,
    )


def _trace_cache(request: ForecastRequest, job: Job, values: Mapping[str, Value]) -> TraceCache | None:
    options = {"optimizer": request.optimizer, "task": request.task, "make_batch": request.make_batch}
    identity = fingerprint(
        request.model,
        settings=values,
        varied=_varied_keys(request, job),
        configs=request.configs,
        options=options,
    )
    return None if identity is None else TraceCache(identity)


def with_optimizer(job: Job, name: str | None, *, on_progress: OnProgress) -> Job:
    """Return the job with the optimizer of its config, unless the job names one."""
    if name is None or job.make_optimizer is not adamw:
        return job
    make = optimizer_named(name)
    if make is None:
        on_progress(f"the optimizer {name!r} is not known; planned as AdamW, which keeps two values each")
        return job
    return dataclasses.replace(job, make_optimizer=make)


def nest_keys(values: Mapping[str, object]) -> dict[str, object]:
    """Return nested values: {"a.b": 1, "c.0": 2} becomes {"a": {"b": 1}, "c": [2]}."""
    result: dict[str, object] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        place = result
        for name in path:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                raise BadInput(
                    f"{key} lies below {name}, which has a value of its own",
                    hint=f"set {key} or {name}, not both",
                )
            place = inner
        place[last] = value
    return {key: _with_lists(value) for key, value in result.items()}


def _with_lists(value: object) -> object:
    """Turn keys that count from 0 into a list."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if [*inner] == [str(number) for number in range(len(inner))]:
        return [*inner.values()]
    return inner


def find_segments(
    wanted: bool | None = None, *, profile: bool = False, environment: Mapping[str, str] | None = None
) -> Decision[bool]:
    """Return whether segments are expandable: what is `wanted`, else what the environment says.

    A probe runs under the environment's setting, so that it cannot measure another.
    """
    found = _of_environment(os.environ if environment is None else environment)
    if wanted is None:
        return found
    flag = "--expandable-segments" if wanted else "--no-expandable-segments"
    if profile and wanted != found.value:
        raise BadInput(
            f"{flag} cannot be measured with --profile: the probe runs under {found.reason}",
            hint=f"set {VARIABLES[0]}=expandable_segments:{wanted} instead of the flag",
        )
    return Decision(value=wanted, reason=f"{flag} was given", source="assumed")


def _of_environment(environment: Mapping[str, str]) -> Decision[bool]:
    for name in VARIABLES:
        if name in environment:
            value = expandable_segments_of(environment[name])
            return Decision(value=value, reason=f"{name} as it is set here", source="assumed")
    return Decision(value=False, reason="PyTorch's default, as nothing is set here", source="assumed")
