"""The verbs: the only place where rooms are composed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.codec import encode
from flatout.doctor.examine import examine
from flatout.doctor.finding import Finding
from flatout.errors import BadInput
from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence

if TYPE_CHECKING:
    from flatout.hardware import Device
    from flatout.memory.estimate import MemoryEstimate
    from flatout.memory.forecast import Parallel
    from flatout.memory.job import Precision
    from flatout.planner.apply import Backup, FileEdit
    from flatout.planner.documents import Value
    from flatout.planner.forecast import Forecast
    from flatout.planner.opened import OpenedConfig
    from flatout.planner.show import Overview
    from flatout.planner.suggestions import Fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Evidence and what the doctor concludes from it."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    evidence_path: Path | None = None
    script_exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "flatout-diagnosis",
            "version": 1,
            "findings": encode(self.findings),
            "evidence": self.evidence.to_json(),
        }


def diagnose_evidence(path: Path) -> Diagnosis:
    """The findings of a saved Evidence file."""
    evidence = load_evidence(path)
    return Diagnosis(evidence=evidence, findings=examine(evidence), evidence_path=path)


def diagnose_script(
    command: Sequence[str],
    *,
    module: bool = False,
    keep_running: bool = False,
    evidence_path: Path | None = None,
    seconds: float = 60.0,
    script_stdout_to_stderr: bool = False,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Diagnosis:
    """Run `command` (a script or, with `module`, a module name, then its arguments) and diagnose it.

    The Evidence is written to `evidence_path` even when the job crashes or is interrupted; both raise.
    """
    from flatout.measure import launch

    path = evidence_path or launch.default_evidence_path(command)
    evidence = launch.run_job(
        command,
        module=module,
        keep_running=keep_running,
        evidence_path=path,
        seconds=seconds,
        script_stdout_to_stderr=script_stdout_to_stderr,
        on_progress=on_progress,
    )
    return Diagnosis(
        evidence=evidence,
        findings=examine(evidence),
        evidence_path=path,
        script_exit_code=evidence.job.exit_code,
    )


def diagnose(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    seconds: float = 60.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Diagnosis:
    """Diagnose a training loop given as `step(batch)` and a loader, in this process."""
    from flatout.measure.loop import observe_loop

    evidence = observe_loop(step, loader, seconds=seconds, on_progress=on_progress)
    return Diagnosis(evidence=evidence, findings=examine(evidence))


def plan(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    on_progress: Callable[[str], None] = lambda message: None,
) -> MemoryEstimate:
    """The memory of one training step on `device` ("A100-80GB", "24GB"), without a GPU.

    With several `ranks` it is that of one of them, under "ddp" or "fsdp2".

    `model_or_step` is a module or a function `step(batch)` that returns the loss; `batch` is an example, or
    a function that makes one; `optimizer` an instance, a class, or None for AdamW.
    """
    from flatout.memory.existing import job_of
    from flatout.memory.forecast import estimate_job
    from flatout.memory.job import Recipe

    recipe = Recipe(
        precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
    )
    job = job_of(model_or_step, batch, optimizer=optimizer, loss=loss)
    return estimate_job(job, recipe, device=device, ranks=ranks, parallel=parallel, on_progress=on_progress)


# Plans of configs


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
    on_progress: Callable[[str], None] = lambda message: None


ForecastMaker = Callable[[ForecastRequest], "Forecast"]


def _forecast(request: ForecastRequest) -> Forecast:
    """The memory room behind a plan: the one place where `planner` meets `memory`."""
    from flatout.memory.sources import load_job
    from flatout.planner.traced import TracedForecast, nested, with_optimizer

    job, _recipe = load_job(request.model, settings=nested(request.values))
    job = with_optimizer(job, request.optimizer, on_progress=request.on_progress)
    return TracedForecast(
        job,
        device=request.device,
        ranks=request.ranks,
        profile=request.profile,
        on_progress=request.on_progress,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigPlan:
    """A config and what it does to a device."""

    opened: OpenedConfig
    overview: Overview
    missing: str | None = None  # why there is no memory to show

    def to_json(self) -> dict[str, Any]:
        return {"format": "flatout-plan", "version": 1, **encode(self.overview), "missing": self.missing}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFit:
    """A config made to fit, not yet written."""

    opened: OpenedConfig
    fit: Fit
    choose: str | None = None

    def edits(self) -> tuple[FileEdit, ...]:
        """What the chosen suggestion changes in the files; BadInput where there is no place for it."""
        from flatout.planner.apply import plan_edits
        from flatout.planner.fit import changes_of

        return plan_edits(self.opened.config, changes_of(self.fit, choose=self.choose))

    def to_json(self) -> dict[str, Any]:
        chosen = [group.suggestion(self.choose).names[0] for group in self.fit.groups]
        usable_bytes = self.fit.budget.usable_bytes
        document = {"format": "flatout-fit", "version": 1, **encode(self.fit), "chosen": chosen}
        return {**document, "usable_bytes": usable_bytes}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What `plan show` and `plan fit` share."""

    model: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    margin: float = 0.85
    ranks: int | None = None
    mapping_file: Path | None = None
    knobs: Sequence[str] = ()
    overrides: Sequence[str] = ()
    profile: bool = False
    on_progress: Callable[[str], None] = field(default=lambda message: None)


def plan_config(
    conf: Path, options: PlanOptions | None = None, *, make_forecast: ForecastMaker | None = None
) -> ConfigPlan:
    """The settings of a config and, where a model and a device are known, the memory of every stage."""
    from flatout.planner.budget import find_budget
    from flatout.planner.show import overview

    options = options or PlanOptions()
    opened = _opened(conf, options)
    settings = opened.settings(ranks=options.ranks)
    model = options.model or opened.mapped.model
    missing = None if model else _MODEL_HINT
    try:
        budget = find_budget(
            gpu=options.gpu, gpu_memory=options.gpu_memory, margin=options.margin, ranks=settings.ranks.value
        )
    except BadInput:
        if model or options.gpu or options.gpu_memory:
            raise
        budget = None
    if model is None or budget is None:
        return ConfigPlan(
            opened=opened, overview=overview(settings, budget=budget, forecast=None), missing=missing
        )
    forecast = (make_forecast or _forecast)(_request(opened, options, model=model, device=budget.device))
    settings = opened.settings(ranks=options.ranks, size_names=tuple(forecast.sizes))
    return ConfigPlan(opened=opened, overview=overview(settings, budget=budget, forecast=forecast))


def fit_config(
    conf: Path,
    options: PlanOptions | None = None,
    *,
    effective_batch: int | None = None,
    allow: Sequence[str] = (),
    choose: str | None = None,
    make_forecast: ForecastMaker | None = None,
) -> ConfigFit:
    """The largest safe batch of a config on a device, with its effective batch kept; nothing is written."""
    from flatout.planner.budget import find_budget
    from flatout.planner.fit import fit_settings
    from flatout.planner.suggestions import Wish

    options = options or PlanOptions()
    opened = _opened(conf, options)
    settings = opened.settings(ranks=options.ranks)
    budget = find_budget(
        gpu=options.gpu, gpu_memory=options.gpu_memory, margin=options.margin, ranks=settings.ranks.value
    )
    model = options.model or opened.mapped.model
    if model is None:
        raise BadInput("a fit needs to know the model", hint=_MODEL_HINT)
    forecast = (make_forecast or _forecast)(_request(opened, options, model=model, device=budget.device))
    settings = opened.settings(ranks=options.ranks, size_names=tuple(forecast.sizes))
    wish = Wish(effective_batch=effective_batch, allow=tuple(allow), choose=choose)
    fit = fit_settings(settings, budget=budget, forecast=forecast, wish=wish)
    return ConfigFit(opened=opened, fit=fit, choose=choose)


def apply_config(fitted: ConfigFit) -> Backup | None:
    """Write a fit into its config, all files or none; None where there is nothing to change."""
    from flatout.planner.apply import apply_edits

    return apply_edits(fitted.edits(), root=fitted.opened.config.root)


def undo_config(conf: Path, *, force: bool = False) -> Backup:
    """Take back the last plan that was written into a config."""
    from flatout.planner.apply import undo
    from flatout.planner.configs import main_file

    return undo(main_file(conf).parent, force=force)


_MODEL_HINT = "name it with --model pkg.module:build, or as model in flatout-plan.toml"


def _opened(conf: Path, options: PlanOptions) -> OpenedConfig:
    from flatout.planner.opened import open_config

    return open_config(
        conf, mapping_file=options.mapping_file, knobs=options.knobs, overrides=options.overrides
    )


def _request(opened: OpenedConfig, options: PlanOptions, *, model: str, device: Device) -> ForecastRequest:
    stage = opened.config.stages[0]
    optimizer = opened.settings().stages[0].optimizer
    return ForecastRequest(
        model=model,
        device=device,
        values={key: found.value for key in stage.values if (found := stage.find(key)) is not None},
        overrides=opened.overrides,
        optimizer=optimizer.value if optimizer else None,
        ranks=opened.settings(ranks=options.ranks).ranks.value,
        profile=options.profile,
        on_progress=options.on_progress,
    )
