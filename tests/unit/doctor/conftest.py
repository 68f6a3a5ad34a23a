"""A healthy job, made by hand: each test gives it one fault, or one thing that only looks like a fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.measure.evidence import (
    ArmNotRun,
    Call,
    Counterfactual,
    Evidence,
    Gpu,
    Host,
    Kernels,
    Loader,
    ModuleCall,
    ObservedJob,
    OptimizerSetup,
    Place,
    Precision,
    Site,
    Spread,
    Step,
)

STEP_S = 0.1


def place(line: int, *, file: str = "train.py", function: str | None = "train") -> Place:
    return Place(file=file, line=line, function=function)


def job(*, device: str = "cpu") -> ObservedJob:
    return ObservedJob(
        command=("train.py",),
        folder="/job",
        started_at="2031-05-04T10:11:12+00:00",
        ended="measured",
        exit_code=None,
        error=None,
        device=device,
        device_name=None,
        python="3.12.4",
        torch="2.13.0",
        flatout="0.1.0",
    )


def steps(
    *, wait_share: float = 0.02, rows: int | None = 32, num_batches: int = 1, optimizer_s: float = 0.0
) -> tuple[Step, ...]:
    """Four undisturbed steps of 100 ms, and two while calls were counted, twice as slow."""
    wait_s = STEP_S * wait_share
    phases = {"wait": wait_s, "forward": 0.04, "backward": 0.05 - optimizer_s, "rest": 0.01 - wait_s}
    phases["optimizer"] = optimizer_s
    real = [
        Step(
            index=index,
            arm="real",
            block=0,
            step_s=STEP_S,
            phases_s=phases,
            rows=rows,
            num_batches=num_batches,
        )
        for index in range(4)
    ]
    counted = [
        Step(index=4 + index, arm="count", block=1, step_s=2 * STEP_S, phases_s={}, rows=rows)
        for index in range(2)
    ]
    return (*real, *counted)


def evidence(*, device: str = "cpu", **fields: Any) -> Evidence:
    """A job without a fault; on "cuda" it computes on an H200."""
    healthy: dict[str, Any] = {
        "job": job(device=device),
        "host": Host(cores=4.0, memory_bytes=2**34),
        "steps": steps(),
        "attributed_step_s": 0.2,
    }
    if device == "cuda":
        healthy["gpu"] = Gpu(
            name="NVIDIA H200",
            memory_bytes=140 * 2**30,
            compute_capability="9.0",
            peak_flops={"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12},
        )
        healthy["precision"] = Precision(
            parameter_dtypes=("float32",), autocast=None, tf32_matmul=False, bf16_supported=True
        )
    return Evidence(**{**healthy, **fields})


def spread(mean_s: float) -> Spread:
    return Spread(num=8, mean_s=mean_s, median_s=mean_s, p95_s=mean_s, max_s=mean_s)


def loader(**changes: Any) -> Loader:
    fields: dict[str, Any] = {
        "place": place(10),
        "dataset": "Samples",
        "num_workers": 0,
        "batch_size": 32,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "num_batches": 20,
        "trains": True,
    }
    return Loader(**{**fields, **changes})


def site(kind: Any, *, line: int = 30, **changes: Any) -> Site:
    fields: dict[str, Any] = {
        "kind": kind,
        "op": "op",
        "place": place(line, function="Model.forward"),
        "via": None,
        "calls_per_step": 64.0,
        "host_s": 0.02,
    }
    return Site(**{**fields, **changes})


def module_call(**changes: Any) -> ModuleCall:
    fields: dict[str, Any] = {
        "module": "Model",
        "place": place(40),
        "calls_per_step": 1.0,
        "rows": 32,
        "training": True,
        "has_parameters": True,
        "host_s": 0.06,
    }
    return ModuleCall(**{**fields, **changes})


def optimizer(**changes: Any) -> OptimizerSetup:
    fields: dict[str, Any] = {
        "name": "AdamW",
        "place": place(12),
        "num_groups": 1,
        "num_distinct": 1,
        "num_tensors": 465,
        "way": "default",
    }
    return OptimizerSetup(**{**fields, **changes})


def kernels(**changes: Any) -> Kernels:
    fields: dict[str, Any] = {
        "num_steps": 3,
        "step_s": 0.2,
        "busy_share": 0.9,
        "num_kernels": 300.0,
        "median_kernel_s": 2e-5,
        "gap_s": 0.02,
        "sync_gap_s": 0.0,
        "num_syncs": 0.0,
        "by_category_s": {},
        "matmul_s_by_dtype": {},
        "top": (),
    }
    return Kernels(**{**fields, **changes})


def counterfactual(
    kind: str, speedup: float, *, width: float = 0.02, line: int | None = None, **changes: Any
) -> Counterfactual:
    """An arm of `kind`; with a `line`, one about that line."""
    fields: dict[str, Any] = {
        "kind": kind,
        "label": kind if line is None else f"{kind} train.py:{line}",
        "baseline": "real",
        "step_s": STEP_S / speedup,
        "baseline_step_s": STEP_S,
        "speedup": speedup,
        "speedup_low": speedup - width,
        "speedup_high": speedup + width,
        "num_blocks": 3,
        "num_steps": 12,
        "place": None if line is None else place(line, function="Model.forward"),
        "last_line": line,
    }
    return Counterfactual(**{**fields, **changes})


def not_run(kind: str, reason: str, *, line: int = 30) -> ArmNotRun:
    """An arm that found out why it cannot run, or had no time to."""
    return ArmNotRun(kind=kind, label=f"{kind} train.py:{line}", reason=reason, place=place(line))


def call(function: str, *, calls_per_batch: float, line: int = 20, in_collate: bool = True) -> Call:
    return Call(
        function=function,
        place=place(line, function="collate"),
        in_collate=in_collate,
        calls_per_batch=calls_per_batch,
    )


@pytest.fixture
def made() -> SimpleNamespace:
    """The parts of hand-made Evidence, by name."""
    builders = (
        place,
        steps,
        evidence,
        spread,
        loader,
        site,
        module_call,
        kernels,
        counterfactual,
        call,
        not_run,
        optimizer,
    )
    return SimpleNamespace(**{builder.__name__: builder for builder in builders})
