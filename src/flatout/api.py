"""The verbs: the only place where rooms are composed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.doctor.examine import Diagnosis, examine
from flatout.errors import BadInput
from flatout.measure.evidence_file import load_evidence
from flatout.planner.plan import ConfigFit, ConfigPlan, PlanOptions

if TYPE_CHECKING:
    from flatout.engines.adapters.verbs import Outcome as Adaptation
    from flatout.engines.evolution.training.records import EpochRecord
    from flatout.engines.evolution.training.trainer import EvolveOutcome as Evolution
    from flatout.hardware.device import Device
    from flatout.memory.jobs.job import Precision
    from flatout.memory.predict.estimate import MemoryEstimate
    from flatout.memory.predict.forecast import Parallel
    from flatout.monitor.past.compare import Comparison
    from flatout.monitor.past.summary import Summary
    from flatout.monitor.sinks.choice import SinkChoice
    from flatout.planner.config.backups import Backup
    from flatout.planner.config.lengths import Lengths
    from flatout.planner.config.opened import OpenedConfig
    from flatout.planner.config.settings import Settings
    from flatout.planner.fit.progress import Progress
    from flatout.planner.forecast.load import ForecastRequest
    from flatout.planner.forecast.questions import Forecast


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
    from flatout.measure.run import launch

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
    from flatout.measure.run.loop import observe_loop

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
    native: bool = False,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    on_progress: Callable[[str], None] = lambda message: None,
) -> MemoryEstimate:
    """The memory of one training step on `device` ("A100-80GB", "24GB"), without a GPU.

    With `native` the GPU that is here chooses the kernels.  With several `ranks` it is the memory of one of
    them, under "ddp" or "fsdp2".

    `model_or_step` is a module or a function `step(batch)` that returns the loss; `batch` is an example, or
    a function that makes one; `optimizer` an instance, a class, or None for AdamW.
    """
    from flatout.memory.jobs.from_objects import job_of
    from flatout.memory.jobs.job import Recipe
    from flatout.memory.predict.forecast import estimate_job

    recipe = Recipe(
        precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
    )
    job = job_of(model_or_step, batch, optimizer=optimizer, loss=loss)
    where: dict[str, Any] = {"device": device, "native": native, "ranks": ranks, "parallel": parallel}
    return estimate_job(job, recipe, on_progress=on_progress, **where)


def evolve(
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    on_epoch: Callable[[EpochRecord], None] = lambda record: None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Evolution:
    """Evolve a language model on a task; `settings` are the keys of a config of `flatout evolve`."""
    from flatout.engines.evolution.training.trainer import evolve

    return evolve(settings, resume=resume, on_event=on_epoch, on_progress=on_progress)


def adapt(
    settings: Mapping[str, Any],
    *,
    phases: tuple[str, ...] = ("phase1", "phase2", "phase3"),
    resume: bool = False,
    heads_only: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Adaptation:
    """Train adapters and their router; `settings` are the keys of a config of `flatout adapt`."""
    from flatout.engines.adapters.verbs import train

    return train(
        settings, phases=phases, resume=resume, heads_only=heads_only, on_line=on_line, on_note=on_progress
    )


# Watched runs


def watch_script(
    command: Sequence[str],
    *,
    module: bool = False,
    name: str | None = None,
    hz: float = 1.0,
    folder: Path | None = None,
    sinks: SinkChoice | None = None,
) -> NoReturn:
    """Become `command`, an unmodified script under watch; its exit code and its signals are its own."""
    from flatout.measure.run.launch import check_command
    from flatout.monitor.job.run_script import LaunchOptions, launch
    from flatout.monitor.sinks.choice import SinkChoice

    check_command(command, module=module)
    options = LaunchOptions(
        command=tuple(command),
        module=module,
        name=name,
        hz=hz,
        folder=None if folder is None else str(folder.absolute()),
        sinks=sinks or SinkChoice(),
    )
    launch(options)


def report_run(
    run: str | Path, *, root: Path | None = None, html: Path | None = None, png: Path | None = None
) -> Summary:
    """The figures of a run that is kept; also written as a page and as plots where these are named."""
    from flatout.monitor.past.recorded import read_recorded
    from flatout.monitor.past.summary import summarise
    from flatout.runs import find_run

    recorded = read_recorded(find_run(str(run), root))
    if png is not None:
        from flatout.monitor.past.charts import plot_run

        plot_run(recorded, png)
    if html is not None:
        from flatout.monitor.past.report import page
        from flatout.page.document import write_page

        write_page(page(recorded), html)
    return summarise(recorded)


def compare_runs(first: str | Path, second: str | Path, *, root: Path | None = None) -> Comparison:
    """Two runs that are kept, and the differences between them that are more than noise."""
    from flatout.monitor.past.compare import compare
    from flatout.monitor.past.recorded import read_recorded
    from flatout.runs import find_run

    return compare(*(read_recorded(find_run(str(run), root)) for run in (first, second)))


# Plans of configs


ForecastMaker = Callable[["ForecastRequest"], "Forecast"]


def _forecast(request: ForecastRequest) -> Forecast:
    from flatout.planner.forecast.load import load_forecast

    return load_forecast(request)


def plan_config(
    conf: Path, options: PlanOptions | None = None, *, make_forecast: ForecastMaker | None = None
) -> ConfigPlan:
    """The settings of a config and, where a model and a device are known, the memory of every stage."""
    from flatout.planner.fit.budget import find_budget
    from flatout.planner.fit.progress import Progress
    from flatout.planner.fit.show import overview

    options = options or PlanOptions()
    opened = _opened(conf, options)
    settings = opened.settings(ranks=options.ranks)
    model = options.model or opened.mapped.model
    lengths = _lengths(options)
    try:
        budget = find_budget(
            gpu=options.gpu, gpu_memory=options.gpu_memory, margin=options.margin, ranks=settings.ranks.value
        )
    except BadInput:
        if model or options.gpu or options.gpu_memory:
            raise
        budget = None
    if model is None or budget is None:
        seen = overview(settings, budget=budget, forecast=None)
        missing = None if model else _MODEL_HINT
        return ConfigPlan(opened=opened, overview=seen, missing=missing, lengths=lengths)
    progress = Progress(options.on_progress)
    request = _request(opened, options, model=model, device=budget.device, progress=progress)
    forecast = (make_forecast or _forecast)(request)
    settings = _job_settings(opened, options, forecast=forecast, lengths=lengths)
    seen = overview(settings, budget=budget, forecast=forecast, progress=progress)
    return ConfigPlan(opened=opened, overview=seen, request=request, lengths=lengths)


def fit_config(
    conf: Path,
    options: PlanOptions | None = None,
    *,
    effective_batch: int | None = None,
    allow: Sequence[str] = (),
    choose: str | None = None,
    to_apply: bool = False,
    make_forecast: ForecastMaker | None = None,
) -> ConfigFit:
    """The largest batch of a config that fits a device, with its effective batch kept; nothing is written.

    A fit `to_apply` is refused before any work where its values could not be written.
    """
    from flatout.planner.config.backups import check_places
    from flatout.planner.fit.budget import find_budget
    from flatout.planner.fit.fit_settings import fit_settings
    from flatout.planner.fit.progress import Progress
    from flatout.planner.fit.suggestions import Wish

    options = options or PlanOptions()
    opened = _opened(conf, options)
    settings = opened.settings(ranks=options.ranks)
    if to_apply:
        knobs = (knob for stage in settings.stages for knob in (stage.batch_size, stage.accumulation))
        check_places(opened.config, (knob.place for knob in knobs if knob.place is not None))
    budget = find_budget(
        gpu=options.gpu, gpu_memory=options.gpu_memory, margin=options.margin, ranks=settings.ranks.value
    )
    model = options.model or opened.mapped.model
    if model is None:
        raise BadInput("a fit needs to know the model", hint=_MODEL_HINT)
    lengths = _lengths(options)
    progress = Progress(options.on_progress)
    request = _request(opened, options, model=model, device=budget.device, progress=progress)
    forecast = (make_forecast or _forecast)(request)
    settings = _job_settings(opened, options, forecast=forecast, lengths=lengths)
    wish = Wish(effective_batch=effective_batch, allow=tuple(allow), choose=choose)
    fit = fit_settings(settings, budget=budget, forecast=forecast, wish=wish, progress=progress)
    return ConfigFit(opened=opened, fit=fit, request=request, choose=choose, lengths=lengths)


def apply_config(fitted: ConfigFit) -> Backup | None:
    """Write a fit into its config, all files or none; None where there is nothing to change."""
    from flatout.planner.config.backups import apply_edits

    config = fitted.opened.config
    return apply_edits(fitted.edits(), root=config.root, config=config.path)


def undo_config(conf: Path, *, force: bool = False) -> Backup:
    """Take back the last plan that was written into a config."""
    from flatout.planner.config.backups import undo
    from flatout.planner.config.job_config import main_file

    path = main_file(conf)
    return undo(path.parent, config=path, force=force)


_MODEL_HINT = "name it with --model pkg.module:build, or as model in flatout-plan.toml"


def _opened(conf: Path, options: PlanOptions) -> OpenedConfig:
    from flatout.planner.config.opened import open_config

    return open_config(
        conf, mapping_file=options.mapping_file, knobs=options.knobs, overrides=options.overrides
    )


def _lengths(options: PlanOptions) -> Lengths | None:
    from flatout.planner.config.lengths import read_lengths

    return None if options.lengths is None else read_lengths(options.lengths)


def _job_settings(
    opened: OpenedConfig, options: PlanOptions, *, forecast: Forecast, lengths: Lengths | None
) -> Settings:
    """The settings with every size that the job has."""
    from flatout.planner.config.lengths import with_lengths
    from flatout.planner.config.settings import with_job_sizes

    settings = opened.settings(ranks=options.ranks, size_names=tuple(forecast.sizes))
    if lengths is not None:
        settings = with_lengths(settings, lengths, job_sizes=forecast.sizes)
    return with_job_sizes(settings, forecast.sizes)


def _request(
    opened: OpenedConfig,
    options: PlanOptions,
    *,
    model: str,
    device: Device,
    progress: Progress,
) -> ForecastRequest:
    from flatout.planner.forecast.load import ForecastRequest

    stages = opened.values()
    settings = opened.settings(ranks=options.ranks)
    optimizer = settings.stages[0].optimizer
    return ForecastRequest(
        model=model,
        device=device,
        values=next(iter(stages.values())),
        stages=stages,
        overrides=opened.overrides,
        optimizer=optimizer.value if optimizer else None,
        ranks=settings.ranks.value,
        profile=options.profile,
        native=options.native,
        expandable_segments=options.expandable_segments,
        task=options.task,
        make_batch=options.make_batch,
        configs=tuple(opened.config.documents),
        keys_of=opened.keys_of,
        cache=options.cache,
        on_progress=progress.work,
        on_traces=progress.count,
    )
