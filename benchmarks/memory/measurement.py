"""One configuration on the GPU: peaks of three steps, two small probes, the sequence of allocations."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks.memory.configuration import Configuration
from flatout.memory.jobs.step import Parts, make_parts, run_step
from flatout.memory.probe.run_probe import step_past_overflow

DEVICE = "cuda"


def to_device(batch: Any) -> Any:
    return tree_map(lambda value: value.to(DEVICE) if isinstance(value, torch.Tensor) else value, batch)


def set_precision(configuration: Configuration) -> None:
    if configuration.recipe.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def forget() -> None:
    """Give everything back that is not in use, workspaces of cuBLAS too."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def set_up(configuration: Configuration, *, batch_size: int) -> tuple[Parts, Any]:
    """Model, optimizer and batch on the GPU, with nothing of their making left in the cache."""
    torch.manual_seed(0)
    parts = make_parts(configuration.job, configuration.recipe, device=DEVICE)
    batch = to_device(configuration.job.make_batch(**configuration.sizes(batch_size=batch_size)))
    forget()
    torch.cuda.reset_peak_memory_stats()
    return parts, batch


def steps(configuration: Configuration, parts: Parts, batch: Any, *, count: int) -> float:
    """Run them; seconds of the last one."""
    start = time.perf_counter()
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run_step(parts, configuration.job, configuration.recipe, batch, device=DEVICE)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(configuration: Configuration, num_steps: int, record_history: bool) -> dict[str, Any]:
    start = time.perf_counter()
    set_precision(configuration)
    row = _full_size(configuration, num_steps)
    row["probes"] = [_probe(configuration, batch_size) for batch_size in probe_sizes(configuration)]
    if record_history:
        from benchmarks.memory.history import record

        row["history"] = record(configuration)
    row["seconds"] = time.perf_counter() - start
    return row


def _full_size(configuration: Configuration, num_steps: int) -> dict[str, Any]:
    parts, batch = set_up(configuration, batch_size=configuration.batch_size)
    after_setup = torch.cuda.memory_stats()
    # a scaler that skips its first steps leaves them without the optimizer's state
    step_past_overflow(parts, configuration.job, configuration.recipe, batch, device=DEVICE)
    step_s = steps(configuration, parts, batch, count=num_steps)
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    parameters = list(parts.model.parameters())
    return {
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_requested_bytes": stats["requested_bytes.all.peak"],
        "setup_allocated_bytes": after_setup["allocated_bytes.all.current"],
        "setup_reserved_bytes": after_setup["reserved_bytes.all.current"],
        "end_allocated_bytes": stats["allocated_bytes.all.current"],
        "end_reserved_bytes": stats["reserved_bytes.all.current"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "driver_used_bytes": total - free,
        "step_s": step_s,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def probe_sizes(configuration: Configuration) -> list[int]:
    """An eighth and a quarter of the batch, where those are smaller than it and differ."""
    full = configuration.batch_size
    return sorted({max(1, full // 8), max(1, full // 4)} - {full})


def _probe(configuration: Configuration, batch_size: int) -> dict[str, Any]:
    """The same job, built afresh, for two steps at a small batch."""
    forget()
    parts, batch = set_up(configuration, batch_size=batch_size)
    step_past_overflow(parts, configuration.job, configuration.recipe, batch, device=DEVICE)
    step_s = steps(configuration, parts, batch, count=2)
    stats = torch.cuda.memory_stats()
    return {
        "batch_size": batch_size,
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "step_s": step_s,
    }
