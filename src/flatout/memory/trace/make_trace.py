"""A trace in this process, in one of two ways; both change the process permanently, so they run in a child.

By the *rules*, tensors without data live on the CPU, which is made to choose as CUDA would (`cuda.rules`): no
GPU is needed, and any GPU can be asked about.  *Natively*, they live on the GPU that is here, so that PyTorch
itself decides what autocast casts, which attention kernel runs and how results lie in memory.  What no kernel
tells (blocks that it takes for a while, and what cuDNN keeps of recurrent layers) follows the same formulas
in both.  Attention kernels are chosen by the compute capability of the GPU; kernels that sum keep a part for
each of its multiprocessors.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging

from flatout.ground.errors import BadInput
from flatout.hardware.device import Device
from flatout.hardware.matching import all_datasheets
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.process.isolated_process import check_backward, check_cuda
from flatout.memory.trace.record import Trace

NATIVE, RULED = "a native trace", "a trace"


def import_before_forking() -> None:
    """Import what the first trace imports, once here instead of in every child."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._meta_registrations")


def trace_here(
    job: Job, recipe: Recipe, sizes: Sizes, *, device: Device | None, last_micro_batch: bool = False
) -> Trace:
    """Trace a step by the rules, for `device`."""
    from flatout.memory.cuda import rules

    _prepare_process()
    capability = capability_of(device)
    rules.install(compute_capability=capability)
    return _trace(job, recipe, sizes, capability, multiprocessors_of(device), last_micro_batch)


def trace_natively(
    job: Job, recipe: Recipe, sizes: Sizes, *, device: Device | None, last_micro_batch: bool = False
) -> Trace:
    """Trace a step on fake tensors of the first GPU, which must be of the kind of `device`, if known."""
    check_cuda(0, what=NATIVE)
    import torch

    from flatout.memory.cuda import rules

    capability = torch.cuda.get_device_capability(0)
    check_kind(device, name=torch.cuda.get_device_name(0), capability=capability)
    torch.zeros(1, device="cuda")  # a backward of CUDA tensors needs the threads that this starts
    _prepare_process()
    rules.install_natively(compute_capability=capability)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return _trace(job, recipe, sizes, capability, count, last_micro_batch, on="cuda")


def _trace(
    job: Job,
    recipe: Recipe,
    sizes: Sizes,
    capability: tuple[int, int] | None,
    num_multiprocessors: int | None,
    last_micro_batch: bool,
    on: str = "cpu",
) -> Trace:
    from flatout.memory.cuda.workspaces import Workspaces
    from flatout.memory.trace.tracer import trace_job

    return trace_job(
        job,
        dataclasses.replace(recipe, accumulation=1) if last_micro_batch else recipe,
        sizes=sizes,
        workspaces=Workspaces(compute_capability=capability, num_multiprocessors=num_multiprocessors),
        device=on,
        last_micro_batch=last_micro_batch,
    )


def check_kind(device: Device | None, *, name: str, capability: tuple[int, int]) -> None:
    """Refuse a native trace for a GPU of another generation than the one that chooses the kernels."""
    wanted = capability_of(device)
    if device is not None and wanted is not None and wanted != capability:
        raise BadInput(
            f"a native trace is for the GPU of this machine, {name}, not for {device.name}",
            hint=f"omit native to plan for {device.name}, or name no GPU",
        )


def _prepare_process() -> None:
    check_backward()
    gc.freeze()  # what was there before is not searched for cycles again and again
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is for a run, not for a trace


def capability_of(device: Device | None) -> tuple[int, int] | None:
    if device is None or device.compute_capability is None:
        return None
    major, _, minor = device.compute_capability.partition(".")
    return int(major), int(minor or 0)


def multiprocessors_of(device: Device | None) -> int | None:
    """Return the multiprocessors of a device, by its datasheet; None if it has none."""
    rows = {row.name: row for row in all_datasheets()}
    row = rows.get(device.datasheet) if device and device.datasheet else None
    return row.multiprocessors if row else None
