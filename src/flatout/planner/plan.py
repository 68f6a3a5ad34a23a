"""`plan show` and `plan fit` of a config: from its files to an answer, and from the answer into its files.

The config is opened and its settings are read once; the forecast names the sizes of the job; the answer is
one versioned document.  A fit carries its edits: what is shown is what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import flatout
from flatout.ground import OnProgress, ignore
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.hardware.device import Device
from flatout.planner.config.backups import (
    Backup,
    FileEdit,
    apply_edits,
    check_places,
    plan_edits,
    show_edits,
    undo,
)
from flatout.planner.config.job_config import main_file
from flatout.planner.config.lengths import SequenceLengths, read_lengths, with_lengths
from flatout.planner.config.settings import OpenedConfig, Settings, open_config, with_job_sizes
from flatout.planner.fit.fit_settings import changes_of, fit_settings
from flatout.planner.fit.fits import DEFAULT_MARGIN, Budget, Forecast, find_budget
from flatout.planner.fit.progress import Progress
from flatout.planner.fit.show import Overview, overview
from flatout.planner.fit.suggestions import Fit, Wish
from flatout.planner.forecast.load import ForecastOptions, ForecastRequest, load_forecast

ForecastMaker = Callable[[ForecastRequest], Forecast]
MODEL_HINT = "name it with --model pkg.module:build, or as model in flatout-plan.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(ForecastOptions):
    """What `plan show` and `plan fit` share."""

    model: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    margin: float = DEFAULT_MARGIN
    ranks: int | None = None
    mapping_file: Path | None = None
    knobs: Sequence[str] = ()
    overrides: Sequence[str] = ()
    lengths: Path | None = None
    on_progress: OnProgress = ignore


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigAnswer:
    """The config that was asked about, and what its memory was forecast with."""

    opened: OpenedConfig
    request: ForecastRequest | None = None
    lengths: SequenceLengths | None = None

    def document(self, name: str) -> dict[str, Any]:
        """Return the fields that every answer begins with."""
        request = self.request
        return {
            "format": name,
            "version": 1,
            "flatout_version": flatout.__version__,
            "config": str(self.opened.config.path),
            "model": request and request.model,
            "expandable_segments": request and encode(request.segments),
            "native": request and request.native,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigPlan(ConfigAnswer):
    """A config and what it does to a device."""

    overview: Overview
    missing: str | None = None  # why there is no memory to show

    def to_json(self) -> dict[str, Any]:
        budget = self.overview.budget
        return {
            **self.document("flatout-plan"),
            **encode(self.overview),
            "usable_bytes": None if budget is None else budget.usable_bytes,
            "has_findings": self.overview.has_findings,
            "missing": self.missing,
            "lengths": self.lengths
            and self.lengths.to_json(stage.batch_size.value for stage in self.overview.settings.stages),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFit(ConfigAnswer):
    """A config made to fit, with the edits that write the chosen suggestion into it; none is written yet."""

    fit: Fit
    choose: str | None = None
    edits: tuple[FileEdit, ...] = ()
    unwritable: BadInput | None = None  # why the chosen suggestion has no place in the files

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of the chosen suggestions."""
        return [group.suggestion(self.choose).batch_size for group in self.fit.groups]

    @property
    def diff(self) -> str:
        return show_edits(self.edits, root=self.opened.config.root)

    @property
    def warnings(self) -> list[str]:
        return [warning for edit in self.edits for warning in edit.warnings]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.document("flatout-fit"),
            **encode(self.fit),
            "usable_bytes": self.fit.budget.usable_bytes,
            "chosen": [group.suggestion(self.choose).names[0] for group in self.fit.groups],
            "lengths": self.lengths and self.lengths.to_json(self.batch_sizes),
            "diff": self.diff,
            "warnings": self.warnings,
            "unwritable": self.unwritable and str(self.unwritable),
        }


def plan_config(
    conf: Path, options: PlanOptions | None = None, *, make_forecast: ForecastMaker | None = None
) -> ConfigPlan:
    """Read the settings of a config and, if model and device are known, the memory of every stage."""
    options = options or PlanOptions()
    opened, settings, lengths = _open(conf, options)
    model = options.model or opened.mapped.model
    try:
        budget = _budget(options, settings)
    except BadInput:
        if model or options.gpu or options.gpu_memory:
            raise
        budget = None
    if model is None or budget is None:
        seen = overview(opened.with_sizes(settings), budget=budget, forecast=None)
        missing = None if model else MODEL_HINT
        return ConfigPlan(opened=opened, overview=seen, missing=missing, lengths=lengths)
    progress = Progress(options.on_progress)
    request = _request(opened, settings, options, model=model, device=budget.device, progress=progress)
    forecast = (make_forecast or load_forecast)(request)
    settings = _with_job(settings, opened, forecast, lengths)
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
    """Find the largest batch of a config that fits a device, its effective batch kept; write nothing.

    A fit `to_apply` is refused before any work if its values could not be written.
    """
    options = options or PlanOptions()
    wish = Wish(effective_batch=effective_batch, allow=tuple(allow), choose=choose)
    opened, settings, lengths = _open(conf, options)
    if to_apply:
        knobs = (knob for stage in settings.stages for knob in (stage.batch_size, stage.accumulation))
        check_places(opened.config, (knob.place for knob in knobs if knob.place is not None))
    budget = _budget(options, settings)
    model = options.model or opened.mapped.model
    if model is None:
        raise BadInput("a fit needs the model", hint=MODEL_HINT)
    progress = Progress(options.on_progress)
    request = _request(opened, settings, options, model=model, device=budget.device, progress=progress)
    forecast = (make_forecast or load_forecast)(request)
    settings = _with_job(settings, opened, forecast, lengths)
    fit = fit_settings(settings, budget=budget, forecast=forecast, wish=wish, progress=progress)
    edits: tuple[FileEdit, ...] = ()
    unwritable = None
    try:
        edits = plan_edits(opened.config, changes_of(fit, choose=choose))
    except BadInput as error:  # a report is still worth having
        if to_apply:
            raise
        unwritable = error
    return ConfigFit(
        opened=opened,
        fit=fit,
        request=request,
        choose=choose,
        lengths=lengths,
        edits=edits,
        unwritable=unwritable,
    )


def apply_config(fitted: ConfigFit) -> Backup | None:
    """Write a fit into its config, all files or none; None if there is nothing to change."""
    if fitted.unwritable is not None:
        raise fitted.unwritable
    config = fitted.opened.config
    return apply_edits(fitted.edits, root=config.root, config=config.path)


def undo_config(conf: Path, *, force: bool = False) -> Backup:
    """Take back the last plan that was written into a config."""
    path = main_file(conf)
    return undo(path.parent, config=path, force=force)


def _open(conf: Path, options: PlanOptions) -> tuple[OpenedConfig, Settings, SequenceLengths | None]:
    opened = open_config(
        conf, mapping_file=options.mapping_file, knobs=options.knobs, overrides=options.overrides
    )
    lengths = None if options.lengths is None else read_lengths(options.lengths)
    return opened, opened.settings(ranks=options.ranks), lengths


def _budget(options: PlanOptions, settings: Settings) -> Budget:
    return find_budget(
        gpu=options.gpu, gpu_memory=options.gpu_memory, margin=options.margin, ranks=settings.ranks.value
    )


def _with_job(
    settings: Settings, opened: OpenedConfig, forecast: Forecast, lengths: SequenceLengths | None
) -> Settings:
    """Return the settings with every size that the job has."""
    settings = opened.with_sizes(settings, forecast.sizes)
    if lengths is not None:
        settings = with_lengths(settings, lengths, job_sizes=forecast.sizes)
    return with_job_sizes(settings, forecast.sizes)


def _request(
    opened: OpenedConfig,
    settings: Settings,
    options: PlanOptions,
    *,
    model: str,
    device: Device,
    progress: Progress,
) -> ForecastRequest:
    stages = opened.values()
    optimizer = settings.stages[0].optimizer
    return ForecastRequest(
        model=model,
        device=device,
        values=next(iter(stages.values())),
        stages=stages,
        overrides=opened.overrides,
        optimizer=optimizer.value if optimizer else None,
        ranks=settings.ranks.value,
        configs=tuple(opened.config.documents),
        keys_of=opened.keys_of,
        on_progress=progress.work,
        on_traces=progress.count,
        **{each.name: getattr(options, each.name) for each in fields(ForecastOptions)},
    )
