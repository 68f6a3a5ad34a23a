"""The Evidence of a job with a fault for nearly every rule, made by hand.

Contracts change any part of it and look at what rules say; nothing here was measured.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

from flatout.measure.evidence import (
    Call,
    Compilation,
    CompiledFunction,
    Copy,
    Counterfactual,
    Episode,
    EpisodeKind,
    EpochStart,
    FetchLine,
    Garbage,
    Gpu,
    GraphBreak,
    GraphGrowth,
    Host,
    InnerCalls,
    Kernels,
    LargeTensor,
    Lengths,
    Loader,
    Losses,
    Memory,
    ModuleCall,
    Network,
    OptimizerSetup,
    Place,
    Precision,
    Rank,
    RateSchedule,
    Site,
    SiteKind,
    Spread,
    StackPath,
    Stacks,
    Step,
    Threads,
    Training,
    Untrained,
)
from flatout.testing.rules import EMPTY, JOB

_KINDS: tuple[SiteKind, ...] = ("create", "row", "cell", "sync")
_COUNTERFACTUALS = (
    "cached",
    "half",
    "tf32",
    "autocast",
    "padded-products",
    "channels-last",
    "no-checkpointing",
    "uncompiled",
    "fused-attention",
)
_HERE = Place(file="train.py", line=7, function="train")
_BATCH = Spread(num=8, mean_s=0.05, median_s=0.05, p95_s=0.05, max_s=0.05)
_LOADER = Loader(
    place=_HERE,
    dataset="Samples",
    num_workers=0,
    batch_size=32,
    pin_memory=False,
    persistent_workers=False,
    prefetch_factor=None,
    num_batches=10,
    trains=True,
    collate_s=_BATCH,
    lengths=Lengths(num_samples=320, mean=64.0, max=128, padded_share=0.5, bucketed_share=0.0),
    calls=(
        Call(function="numpy.pad", place=_HERE, in_collate=True, calls_per_batch=32.0),
        Call(function="torch.tensor of arrays", place=_HERE, in_collate=False, calls_per_batch=32.0),
    ),
    lines=(FetchLine(place=_HERE, in_collate=False, samples=100),),
)
_SPLIT = {"wait": 0.072, "forward": 0.147, "optimizer": 0.0155, "rest": 0.0715}
_METRIC = Place(file="train.py", line=9, function="measure")
_LOG = Place(file="train.py", line=12, function="report")
_TRIP = Place(file="train.py", line=30, function="train")
_AVERAGE = Place(file="train.py", line=21, function="average")
_CALLS: tuple[tuple[SiteKind, str, Place, str | None], ...] = (
    *(
        ("call", op, _HERE, None)
        for op in ("detect_anomaly", "empty_cache", "synchronize", "checkpoint", "attention")
    ),
    ("weights", "copy_", _HERE, "torch/nn/modules/module.py:1"),
    ("sync", "nonzero", _HERE, None),
    ("sync", "item", _HERE, None),
    ("sync", "__getitem__", _HERE, None),
    ("sync", "item", _METRIC, "torch/distributions/distribution.py:1"),
)
_CALL = ModuleCall(
    module="Model",
    place=_HERE,
    calls_per_step=32.0,
    rows=1,
    training=True,
    has_parameters=True,
    host_s=0.1,
)
# A job with many faults, so that what follows meets rules that have something to say.
SICK = dataclasses.replace(
    EMPTY,
    compilation=Compilation(
        functions=(
            CompiledFunction(
                function="forward",
                place=_HERE,
                num_compiled=6,
                num_recompiled=5,
                compile_s=3.0,
                late_s=1.0,
                num_late_steps=4,
                reasons=("self.num == 3",),
                gave_up=False,
            ),
        ),
        breaks=(GraphBreak(place=_HERE, reason="print cannot be traced", times=1),),
        num_steps=40,
        steps_s=4.0,
    ),
    ranks=tuple(
        Rank(
            rank=rank,
            step_s=0.2,
            phases_s={**_SPLIT, "forward": 0.1 + 0.05 * rank},
            ended="measured",
            node=rank,
            communication_share=0.5,
            exposed_share=0.3,
            link="eth0",
            link_bytes_per_s=3e9,
        )
        for rank in range(2)
    ),
    network=Network(
        backend="gloo",
        num_ranks=2,
        small_bytes=1 << 20,
        small_s=0.01,
        large_bytes=1 << 24,
        large_s=0.16,
        bus_bytes_per_s=1e8,
        link="eth0",
        link_bytes_per_s=3e9,
    ),
    episodes=tuple(
        Episode(
            kind=kind,
            place=_HERE,
            function="evaluate",
            seconds=2.0,
            times=2,
            num_steps=20,
            per_step_s=0.2,
            samples=50,
        )
        for kind in get_args(EpisodeKind)
    ),
    stacks=Stacks(
        num_steps=4,
        samples_by_phase={"rest": 1000},
        paths=(
            StackPath(phase="rest", places=(_METRIC,), samples=1000),
            StackPath(phase="rest", places=(_LOG,), samples=600, library="logging"),
            StackPath(phase="rest", places=(_AVERAGE,), samples=600),
        ),
        loops={str(_AVERAGE): (20,), str(_METRIC): (8,)},
    ),
    sources={"train.py": {"20": "    for average, weights in zip(averages, model.parameters()):"}},
    garbage=Garbage(num_steps=10, steps_s=3.0, pauses_s=1.0, num_paused=10, asked_s=1.0, place=_HERE),
    threads=Threads(num=64, place=_HERE),
    training=Training(
        losses=Losses(num=6, num_not_finite=4, place=_HERE),
        untrained=(Untrained(module="Model", place=_HERE, names=("head.weight",), num=2, num_steps=40),),
        schedules=(
            RateSchedule(
                name="CosineAnnealingLR",
                argument="T_max",
                place=_HERE,
                horizon=3,
                num_steps=40,
                num_optimizer_steps=40,
            ),
        ),
    ),
    job=dataclasses.replace(JOB, device="cuda"),
    host=Host(cores=8.0, memory_bytes=2**34),
    gpu=Gpu(
        name="NVIDIA H200",
        memory_bytes=2**37,
        compute_capability="9.0",
        peak_flops={"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    ),
    steps=(Step(index=0, arm="real", block=0, step_s=0.306, phases_s=_SPLIT, rows=32),),
    loaders=(
        _LOADER,
        dataclasses.replace(
            _LOADER,
            num_workers=2,
            trains=True,
            epochs=(EpochStart(iter_s=1.0, first_wait_s=1.0),) * 2,
            wait_s=_BATCH,
            calls=(),
        ),
        dataclasses.replace(_LOADER, num_workers=1, wait_s=_BATCH, calls=()),
    ),
    sites=(
        *(
            Site(kind=kind, op="op", place=_HERE, via=None, calls_per_step=32.0, device="cuda", host_s=0.05)
            for kind in _KINDS
        ),
        Site(
            kind="copy",
            op="to",
            place=_HERE,
            via=None,
            calls_per_step=2.0,
            device="cuda",
            bytes_per_step=2.0**24,
            pinned=False,
        ),
        *(
            Site(kind=kind, op=op, place=place, via=via, calls_per_step=32.0, device="cuda", host_s=0.05)
            for kind, op, place, via in _CALLS
        ),
        Site(
            kind="copy",
            op="to",
            place=_TRIP,
            via=None,
            calls_per_step=2.0,
            device="cuda",
            bytes_per_step=2.0**24,
            pinned=True,
            blocking=True,
            wide_bytes_per_step=2.0**24,
        ),
        Site(kind="sync", op="cpu", place=_TRIP, via=None, calls_per_step=2.0, device="cuda"),
    ),
    module_calls=(
        _CALL,
        dataclasses.replace(_CALL, rows=32, num_alike=8, unused_gradients=True, autocast="float16"),
    ),
    inner_calls=(
        InnerCalls(module="Expert", place=_METRIC, calls_per_step=8.0, num_modules=8, rows_differ=True),
    ),
    optimizers=tuple(
        OptimizerSetup(name="AdamW", place=_HERE, num_groups=99, num_distinct=2, num_tensors=99, way=way)
        for way in ("for-loop", "foreach")
    ),
    attributed_step_s=0.4,
    kernels=Kernels(
        num_steps=3,
        step_s=0.3,
        busy_share=0.5,
        num_kernels=500.0,
        median_kernel_s=1e-5,
        gap_s=0.06,
        sync_gap_s=0.02,
        num_syncs=32.0,
        by_category_s={"matmul": 0.1, "convolution": 0.1},
        matmul_s_by_dtype={"fp32": 0.1},
        top=(),
        copies=(
            Copy(kind="HtoD pageable", calls_per_step=2.0, total_s=0.01),
            Copy(kind="HtoD pinned", calls_per_step=2.0, total_s=0.01),
        ),
    ),
    memory=Memory(
        num_steps=4,
        peak_bytes=2**37 - 2**32,
        growth_bytes_per_step=2.0**20,
        graphs=(GraphGrowth(holder="losses", holder_place=_HERE, nodes_per_step=40.0),),
        reserved_bytes=2**37,
        num_alloc_retries=3,
        largest=tuple(
            LargeTensor(place=_HERE, op=op, shape=(2**18, 2**15), dtype="float32", num_bytes=2**35)
            for op in ("mm", "_log_softmax")
        ),
    ),
    counterfactuals=tuple(
        Counterfactual(
            kind=name,
            label=name,
            baseline="real",
            step_s=0.1,
            baseline_step_s=0.2,
            speedup=2.0,
            speedup_low=1.8,
            speedup_high=2.2,
            num_blocks=3,
            num_steps=12,
            value=1.0,
        )
        for name in (*_COUNTERFACTUALS, "workers", "whole-batches", "threads", "garbage-off")
    ),
    precision=Precision(
        parameter_dtypes=("float32",),
        autocast=None,
        tf32_matmul=False,
        bf16_supported=True,
        scales_loss=False,
    ),
)
