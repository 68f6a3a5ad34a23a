"""Predict the memory of a job on a GPU, and fit objects or a config to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.hardware.datasheet import Datasheet
    from flatout.hardware.device import Device
    from flatout.hardware.host import HostFacts
    from flatout.hardware.snapshot import Snapshot
    from flatout.memory.jobs.job import Precision
    from flatout.memory.predict.estimate import MemoryEstimate
    from flatout.memory.predict.steps import Parallel
    from flatout.planner.config.backups import Backup
    from flatout.planner.fit.fit_job import JobFit
    from flatout.planner.plan import ConfigFit, ConfigPlan, ForecastMaker, PlanOptions


def read_machine() -> tuple[Snapshot, HostFacts]:
    """Read the GPUs of this machine and the share of the host that a job may use."""
    from flatout.hardware.host import read_host
    from flatout.hardware.nvml import read_gpus

    return read_gpus(), read_host()


def simulated_device(name: str) -> Device:
    """Return a GPU that is not here, by its name or the size of its memory."""
    from flatout.hardware import simulated

    return simulated.simulated_device(name)


def all_datasheets() -> Sequence[Datasheet]:
    """List the GPUs that the datasheet table knows."""
    from flatout.hardware import matching

    return matching.all_datasheets()


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
    """Predict the memory of one training step on `device` ("A100-80GB", "24GB"), without a GPU.

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


def fit(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    margin: float = 0.85,
    precision: Precision = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    native: bool = False,
    on_progress: Callable[[str], None] = lambda message: None,
) -> JobFit:
    """Find the largest batch that trains within a margin of the free memory of `device`.

    Without `device` it is the GPU of this machine; one that is named ("A100-80GB", "24GB") is taken to be
    empty.  `model_or_step`, `batch` and the rest are those of `plan`.  Raises BatchDoesNotFit where not even
    a batch of 1 fits, with what would help.
    """
    from flatout.memory.jobs.from_objects import job_of
    from flatout.memory.jobs.job import Recipe
    from flatout.planner.fit.fit_job import fit_job
    from flatout.planner.fit.fits import find_budget

    recipe = Recipe(
        precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
    )
    job = job_of(model_or_step, batch, optimizer=optimizer, loss=loss)
    budget = find_budget(gpu=device, margin=margin)
    return fit_job(job, recipe, budget=budget, native=native, on_progress=on_progress)


def plan_config(
    conf: Path, options: PlanOptions | None = None, *, make_forecast: ForecastMaker | None = None
) -> ConfigPlan:
    """Read the settings of a config and, where model and device are known, the memory of every stage."""
    from flatout.planner import plan

    return plan.plan_config(conf, options or plan.PlanOptions(), make_forecast=make_forecast)


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

    A fit `to_apply` is refused before any work where its values could not be written.
    """
    from flatout.planner import plan
    from flatout.planner.fit.suggestions import Wish

    wish = Wish(effective_batch=effective_batch, allow=tuple(allow), choose=choose)
    options = options or plan.PlanOptions()
    return plan.fit_config(conf, options, wish, to_apply=to_apply, make_forecast=make_forecast)


def apply_config(fitted: ConfigFit) -> Backup | None:
    """Write a fit into its config, all files or none; None where there is nothing to change."""
    return fitted.apply()


def undo_config(conf: Path, *, force: bool = False) -> Backup:
    """Take back the last plan that was written into a config."""
    from flatout.planner.config.backups import undo
    from flatout.planner.config.job_config import main_file

    path = main_file(conf)
    return undo(path.parent, config=path, force=force)
