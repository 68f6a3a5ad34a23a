"""A short real run of a job, well below the limit: it measures what a trace cannot know.

The job is built on the GPU and stepped a few times at one or two small batches, exactly as the trace steps
it.  Peak bytes come from PyTorch's allocator, the CUDA context from the driver (see `cuda_context`).  The
probe runs in a child process (`isolated_process`), whose context ends with it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes
from flatout.ground.user_code import calling
from flatout.hardware.device import Device, device_of_driver
from flatout.hardware.nvml import read_gpus
from flatout.hardware.snapshot import GpuSnapshot
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.predict.forecast import Forecaster
from flatout.memory.predict.samples import BATCH
from flatout.memory.probe.cuda_context import Reading, context_of, reading_of
from flatout.memory.probe.probe_results import ProbedBatch, ProbeResult
from flatout.memory.process.isolated_process import check_backward, check_cuda, run_with_cuda

if TYPE_CHECKING:
    from flatout.memory.jobs.step import Parts

NUM_STEPS = 3  # the first makes the optimizer's state, the second meets it, the last is timed
MOST_SKIPPED = 20  # steps of a gradient scaler that overflow, each at half the scale of the one before
MOST_SHARE = 0.25  # of free memory, that a probe may be expected to take
PROFILE = "--profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A GPU before a probe."""

    device: Device
    free_bytes: int


def probe(
    job: Job,
    recipe: Recipe,
    *,
    sizes: Sizes | None = None,
    device_index: int = 0,
    batch_sizes: Sequence[int] | None = None,
) -> ProbeResult:
    """Measure `job` at two small batches and return what was measured.

    Without `batch_sizes` they are chosen: at most a quarter of the batch of `sizes`, and such that the
    estimate says at most a quarter of the memory that is free.
    """
    if batch_sizes is not None:
        _check_batches(batch_sizes)
    wanted = {**job.sizes, **(sizes or {})}
    room = run_with_cuda(look_at, device_index, what=PROFILE)
    if batch_sizes is None:
        forecaster = Forecaster(job, device=room.device)

        def process_bytes(batch_size: int) -> int:
            found = forecaster.estimate(recipe, sizes={**wanted, BATCH: batch_size})
            assert found.process_bytes is not None
            return found.process_bytes

        batch_sizes = choose_batches(
            process_bytes, batch_size=wanted[BATCH], free_bytes=room.free_bytes, name=job.name
        )
    work = (measure, job, recipe, wanted, tuple(batch_sizes), device_index)
    return run_with_cuda(*work, what=PROFILE, with_values=True)


def _check_batches(batch_sizes: Sequence[int]) -> None:
    if len(batch_sizes) not in (1, 2) or len(set(batch_sizes)) < len(batch_sizes) or min(batch_sizes) < 1:
        raise BadInput(f"batch_sizes={tuple(batch_sizes)} must be one or two different positive numbers")


def choose_batches(
    process_bytes: Callable[[int], int], *, batch_size: int, free_bytes: int, name: str = "the job"
) -> tuple[int, ...]:
    """Choose a small batch, the largest of batch/4, batch/8, ... that is allowed, and half of it.

    A batch of 1 is often a special case, but better than no probe.
    """
    allowed = int(free_bytes * MOST_SHARE)
    upper = max(1, batch_size // 4)
    while (needed := process_bytes(upper)) > allowed:
        if upper == 1:
            raise BadInput(
                f"a probe of {name} at {BATCH}=1 would take {show_bytes(needed)}, more than a quarter of the "
                f"{show_bytes(free_bytes)} that are free",
                hint="free the GPU, or give the batch sizes to probe",
            )
        upper //= 2
    return (upper // 2, upper) if upper > 1 else (upper,)


def look_at(device_index: int) -> Room:
    """Return the GPU and what is free of it; this takes a context for a moment."""
    import torch

    check_cuda(device_index, what=PROFILE)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device_index)
    before = _gpu(device_index)
    device = before.device if before is not None else None
    if device is None:
        major, minor = torch.cuda.get_device_capability(device_index)
        name = torch.cuda.get_device_name(device_index)
        device = device_of_driver(name, memory_bytes=total_bytes, compute_capability=f"{major}.{minor}")
    return Room(device=device, free_bytes=free_bytes)


def measure(
    job: Job, recipe: Recipe, sizes: dict[str, int], batch_sizes: tuple[int, ...], device_index: int
) -> ProbeResult:
    """Step the job for real in this process, which must be a child: its settings and context stay."""
    before = _reading(device_index, reserved_bytes=0)  # NVML answers without a context
    check_cuda(device_index, what=PROFILE)
    check_backward()
    import torch

    torch.cuda.set_device(device_index)
    if recipe.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    probes, readings = [], []
    counts = (0, 0)
    for batch_size in batch_sizes:
        try:
            with calling(f"a real step of {job.name} at {BATCH}={batch_size}"):
                measured, counts = _step_at(job, recipe, {**sizes, BATCH: batch_size})
        except BadInput as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise BadInput(
                    f"the probe of {job.name} ran out of GPU memory at {BATCH}={batch_size}",
                    hint="give smaller batch sizes to probe, or free the GPU",
                ) from None
            raise
        probes.append(measured)
        readings.append(_reading(device_index, reserved_bytes=torch.cuda.memory_reserved(device_index)))
    context = context_of(before, readings)
    return ProbeResult(
        device=torch.cuda.get_device_name(device_index),
        torch_version=str(torch.__version__),
        other_sizes={name: size for name, size in sizes.items() if name != BATCH},
        num_parameters=counts[0],
        num_trainable=counts[1],
        context_bytes=context.num_bytes,
        context_missing=context.missing,
        probes=tuple(probes),
    )


def _step_at(job: Job, recipe: Recipe, sizes: dict[str, int]) -> tuple[ProbedBatch, tuple[int, int]]:
    """Measure the peaks of a few steps of a job built afresh, with an empty cache."""
    import torch

    from flatout.memory.jobs.example_batch import map_tensors
    from flatout.memory.jobs.step import make_parts, run_step

    torch.manual_seed(0)
    parts = make_parts(job, recipe, device="cuda")
    batch = map_tensors(job.make_batch(**sizes), lambda tensor: tensor.to("cuda"))
    _forget()
    torch.cuda.reset_peak_memory_stats()
    step_s = 0.0
    skipped = step_past_overflow(parts, job, recipe, batch)
    for _ in range(NUM_STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        run_step(parts, job, recipe, batch, device="cuda")
        torch.cuda.synchronize()
        step_s = time.perf_counter() - start_s
    measured = ProbedBatch(
        batch_size=sizes[BATCH],
        num_steps=skipped + NUM_STEPS,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        micro_batch_s=step_s / (recipe.accumulation if recipe.mode == "train" else 1),
    )
    parameters = [(each.numel(), each.requires_grad) for each in parts.model.parameters()]
    counts = (sum(count for count, _ in parameters), sum(count for count, trained in parameters if trained))
    del parts, batch
    _forget()
    return measured, counts


def step_past_overflow(parts: Parts, job: Job, recipe: Recipe, batch: Any, *, device: str = "cuda") -> int:
    """Step until a gradient scaler has let the optimizer step, which only then has state; how often.

    A scaler begins at a scale at which gradients of half precision overflow, skips the step and halves it.
    """
    from flatout.memory.jobs.step import run_step

    if parts.scaler is None or parts.optimizer is None:
        return 0
    for count in range(MOST_SKIPPED):
        before = parts.scaler.get_scale()
        run_step(parts, job, recipe, batch, device=device)
        if parts.scaler.get_scale() >= before:
            return count + 1
    raise BadInput(
        f"{job.name} overflows in fp16: {MOST_SKIPPED} steps were skipped and none was taken",
        hint="probe it in bf16, or with a loss that stays finite",
    )


def _forget() -> None:
    """Give back what is not in use, cuBLAS's workspaces too: each probe meets them for the first time."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _gpu(device_index: int) -> GpuSnapshot | None:
    found = [each for gpu in read_gpus().gpus for each in (gpu, *gpu.instances)]
    return next((gpu for gpu in found if gpu.cuda_index == device_index), None)


def _reading(device_index: int, *, reserved_bytes: int) -> Reading:
    return reading_of(_gpu(device_index), pid=os.getpid(), reserved_bytes=reserved_bytes)
