"""Read this machine, predict the memory of a job given as objects, and fit it to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.ground import OnProgress, ignore

if TYPE_CHECKING:
    from flatout.hardware.host import HostFacts
    from flatout.hardware.snapshot import Snapshot
    from flatout.memory.jobs.job import PrecisionName
    from flatout.memory.predict.estimate import MemoryEstimate
    from flatout.memory.predict.steps import Parallel
    from flatout.planner.fit.fit_job import JobFit


def read_machine() -> tuple[Snapshot, HostFacts]:
    """Read the GPUs of this machine and the share of the host that a job may use."""
    from flatout.hardware.host import read_host
    from flatout.hardware.nvml import read_gpus

    return read_gpus(), read_host()


def plan(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    precision: PrecisionName = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    native: bool = False,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    on_progress: OnProgress = ignore,
) -> MemoryEstimate:
    """Predict the memory of one training step on `device` ("A100-80GB", "24GB"), without a GPU.

    With `native`, the GPU in this machine chooses the kernels.  With several `ranks`, the result is for
    one of them, under "ddp" or "fsdp2".

    `model_or_step` is a module or a function `step(batch)` that returns the loss; `batch` is an example, or
    a function of the batch size that makes one; `optimizer` an instance, a class, or None for AdamW.
    """
    from flatout.memory.jobs.from_objects import job_of
    from flatout.memory.jobs.job import Recipe
    from flatout.memory.predict.forecast import estimate_job

    return estimate_job(
        job_of(model_or_step, batch, optimizer=optimizer, loss=loss),
        Recipe(
            precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
        ),
        device=device,
        native=native,
        ranks=ranks,
        parallel=parallel,
        on_progress=on_progress,
    )


def fit(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    margin: float = 0.85,
    precision: PrecisionName = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    native: bool = False,
    on_progress: OnProgress = ignore,
) -> JobFit:
    """Find the largest batch that trains within a margin of the free memory of `device`.

    The default `device` is the GPU of this machine; a named one ("A100-80GB", "24GB") is assumed to be
    empty.  `model_or_step`, `batch` and the rest are as for `plan`.  Raises BatchDoesNotFit, with what would
    help, if not even a batch of 1 fits.
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
