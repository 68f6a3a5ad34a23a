"""Evidence and findings made by hand: a job like `examples/darkroom` on a GPU, with every field filled.

The numbers are plausible and fixed; nothing here was measured, and no test may read it as a result.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from flatout.doctor.examine import Diagnosis
from flatout.doctor.finding import Ceiling, Finding, Sight
from flatout.measure.evidence import (
    ArmNotRun,
    Call,
    Copy,
    Counterfactual,
    Episode,
    EpochStart,
    Evidence,
    Gpu,
    GraphGrowth,
    Growth,
    Host,
    Kernel,
    Kernels,
    Lengths,
    Loader,
    Memory,
    ModuleCall,
    ObservedJob,
    Place,
    Precision,
    Rank,
    Site,
    Spread,
    StackPath,
    Stacks,
    Step,
    Worker,
)

MODEL = "darkroom/model.py"
DATA = "darkroom/data.py"
TRAIN = "darkroom/train.py"

ROW_LINE = Place(file=MODEL, line=61, function="embed")
CREATE_LINE = Place(file=MODEL, line=58, function="embed")
COLLATE_LINE = Place(file=DATA, line=93, function="collate")
LOADER_LINE = Place(file=TRAIN, line=40, function="main")
SYNC_LINE = Place(file=TRAIN, line=55, function="train")

SOURCES = {
    MODEL: {
        "56": "        rows = []",
        "57": "        for i in range(states.shape[0]):",
        "58": "            kind = torch.tensor(self.kinds[i], device=states.device)",
        "59": "            token = self.token_type(kind)",
        "60": "            for t in range(lengths[i]):",
        "61": "                rows.append(token + self.project(features[i, t]) + self.position[t])",
        "62": "        return torch.stack(rows)",
    },
    DATA: {
        "91": "    batch = samples[0]",
        "92": "    for sample in samples[1:]:",
        "93": "        batch = np.concatenate([batch, sample])",
        "94": "    return torch.from_numpy(batch)",
    },
    TRAIN: {
        "40": "    loader = DataLoader(dataset, batch_size=512, shuffle=True, collate_fn=collate)",
        "54": "        optimizer.step()",
        "55": '        history.append(loss.item() + accuracy.item())  # "& < > \' stay text"',
        "56": "        scheduler.step()",
    },
}

PATTERN: tuple[tuple[str, int], ...] = (
    ("warmup", 6),
    *((arm, 4) for _ in range(3) for arm in ("real", "cached", "half")),
    ("count", 3),
    ("attribution", 2),
    ("kernels", 3),
    ("memory", 4),
)
PHASES_S = {
    "wait": 0.36,
    "transfer": 0.05,
    "forward": 3.1,
    "backward": 4.9,
    "optimizer": 0.04,
    "rest": 0.15,
}
SLOWER: dict[str, float] = {
    "warmup": 1.25,
    "real": 1.0,
    "cached": 1.0,
    "half": 0.52,
    "count": 1.7,
    "attribution": 2.2,
    "kernels": 1.4,
    "memory": 1.3,
}


def steps(*, device: bool = True) -> tuple[Step, ...]:
    """Every arm in the order a diagnosis runs them; the very first step is a long one."""
    made: list[Step] = []
    wobble = itertools.cycle((1.0, 1.03, 0.98, 1.01, 0.99))
    for block, (arm, num_steps) in enumerate(PATTERN):
        for place_in_block in range(num_steps):
            factor = SLOWER[arm] * next(wobble) * (6.0 if not made else 1.0)
            phases = {phase: seconds * factor for phase, seconds in PHASES_S.items()}
            if arm in ("cached", "half"):
                phases["wait"] = 0.0
            made.append(
                Step(
                    index=len(made),
                    arm=arm,
                    block=block,
                    step_s=sum(phases.values()),
                    phases_s=phases,
                    device_phases_s={phase: seconds * 0.97 for phase, seconds in phases.items()}
                    if device
                    else None,
                    rows=256 if arm == "half" else 512,
                    epoch_start=not made,
                    kept=place_in_block > 0,
                )
            )
    return tuple(made)


def loader() -> Loader:
    return Loader(
        place=LOADER_LINE,
        dataset="HistoryDataset",
        num_workers=2,
        batch_size=512,
        pin_memory=False,
        persistent_workers=False,
        prefetch_factor=2,
        num_batches=730,
        trains=True,
        wait_s=Spread(num=30, mean_s=0.36, median_s=0.35, p95_s=0.41, max_s=0.52),
        fetch_s=Spread(num=30, mean_s=0.30, median_s=0.29, p95_s=0.36, max_s=0.40),
        collate_s=Spread(num=30, mean_s=0.31, median_s=0.30, p95_s=0.38, max_s=0.45),
        epochs=(EpochStart(iter_s=0.12, first_wait_s=1.4),),
        workers=(
            Worker(worker=0, num_batches=15, fetch_s=0.30, collate_s=0.31, queue_age_s=0.0021),
            Worker(worker=1, num_batches=15, fetch_s=0.30, collate_s=0.32, queue_age_s=0.0019),
        ),
        collate_place=COLLATE_LINE,
        lengths=Lengths(num_samples=15360, mean=113.2, max=159, padded_share=0.29, bucketed_share=0.02),
        calls=(
            Call(function="numpy.concatenate", place=COLLATE_LINE, in_collate=True, calls_per_batch=511.0),
        ),
    )


def kernels() -> Kernels:
    return Kernels(
        num_steps=3,
        step_s=12.1,
        busy_share=0.118,
        num_kernels=231_400.0,
        median_kernel_s=1.9e-6,
        gap_s=10.6,
        sync_gap_s=0.02,
        num_syncs=514.0,
        by_category_s={"elementwise": 0.74, "matmul": 0.41, "copy": 0.18, "other": 0.09},
        matmul_s_by_dtype={"float32": 0.41},
        top=(
            Kernel(
                name="vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
                category="elementwise",
                calls_per_step=96_100.0,
                total_s=0.44,
                dtype="float32",
            ),
            Kernel(
                name="ampere_sgemm_32x32_sliced1x4_tn",
                category="matmul",
                calls_per_step=57_900.0,
                total_s=0.41,
                dtype="float32",
            ),
            Kernel(
                name="Memcpy HtoD (Pageable -> Device)", category="copy", calls_per_step=1_030.0, total_s=0.18
            ),
        ),
        copies=(Copy(kind="HtoD pageable", calls_per_step=1030.0, total_s=0.18, bytes_per_step=2.4e7),),
        optimizer="foreach",
    )


def memory() -> Memory:
    return Memory(
        num_steps=4,
        peak_bytes=9_876_543_210,
        growth_bytes_per_step=2048.0,
        growth=(
            Growth(
                place=SYNC_LINE,
                holder="history",
                holder_place=SYNC_LINE,
                bytes_per_step=2048.0,
                tensors_per_step=4.0,
                with_graph=True,
            ),
        ),
        graphs=(GraphGrowth(holder="history", holder_place=SYNC_LINE, nodes_per_step=58.0),),
        flops_by_dtype={"float32": 4.1e11},
    )


def knocked_out(place: Place, *, last_line: int, step_s: float) -> Counterfactual:
    """Steps without the lines from `place` on."""
    speedup = 8.60 / step_s
    return Counterfactual(
        kind="knock-out",
        label=f"knock-out {place}",
        baseline="real",
        step_s=step_s,
        baseline_step_s=8.60,
        speedup=speedup,
        speedup_low=0.9 * speedup,
        speedup_high=1.1 * speedup,
        num_blocks=3,
        num_steps=9,
        place=place,
        last_line=last_line,
        function=place.function,
    )


def with_map() -> Evidence:
    """The same job with three blocks knocked out, one inside another."""
    rows = dataclasses.replace(ROW_LINE, line=60)
    blocks = (
        knocked_out(SYNC_LINE, last_line=55, step_s=7.0),
        knocked_out(rows, last_line=61, step_s=1.0),
        knocked_out(dataclasses.replace(ROW_LINE, line=57), last_line=62, step_s=0.2),
    )
    return evidence(counterfactuals=(*counterfactuals(), *blocks))


def counterfactuals() -> tuple[Counterfactual, ...]:
    return (
        Counterfactual(
            kind="cached",
            label="cached",
            baseline="real",
            step_s=8.24,
            baseline_step_s=8.60,
            speedup=1.044,
            speedup_low=1.021,
            speedup_high=1.066,
            num_blocks=3,
            num_steps=9,
        ),
        Counterfactual(
            kind="half",
            label="half",
            baseline="cached",
            step_s=4.29,
            baseline_step_s=8.24,
            speedup=1.921,
            speedup_low=1.880,
            speedup_high=1.960,
            num_blocks=3,
            num_steps=9,
        ),
    )


def sites() -> tuple[Site, ...]:
    return (
        Site(
            kind="row",
            op="Tensor.__getitem__",
            place=ROW_LINE,
            via=None,
            calls_per_step=57_900.0,
            requires_grad=True,
            device="cuda",
            host_s=1.4,
            backward_s=4.1,
        ),
        Site(
            kind="create",
            op="torch.tensor",
            place=CREATE_LINE,
            via=None,
            calls_per_step=512.0,
            device="cuda",
            host_s=0.4,
        ),
        Site(
            kind="sync",
            op="Tensor.item",
            place=SYNC_LINE,
            via=None,
            calls_per_step=2.0,
            device="cuda",
            host_s=0.02,
        ),
        Site(
            kind="copy",
            op="Tensor.to",
            place=SYNC_LINE,
            via=None,
            calls_per_step=4.0,
            device="cuda",
            bytes_per_step=2.4e7,
            pinned=False,
        ),
    )


def ranks() -> tuple[Rank, ...]:
    slow = {**PHASES_S, "forward": 4.0, "backward": 4.0}
    return (
        Rank(rank=0, step_s=8.61, phases_s=dict(PHASES_S), ended="measured", host="node-a"),
        Rank(rank=1, step_s=8.60, phases_s=slow, ended="measured", host="node-b"),
    )


def evidence_of_rank(rank: int, *, own_s: float, waiting_s: float) -> Evidence:
    """A rank that works for `own_s` and waits for the others in backward."""
    phases_s = {"forward": own_s, "backward": waiting_s}
    step = Step(index=0, arm="real", block=0, step_s=own_s + waiting_s, phases_s=phases_s)
    return cpu_evidence(
        job=job(rank=rank, command=(f"rank {rank}",)), steps=(step,), missing=(f"of rank {rank}",)
    )


def job(**changes: Any) -> ObservedJob:
    made = ObservedJob(
        command=("darkroom/train.py", "--batch-size", "512"),
        folder="/home/ada/jobs",
        started_at="2031-05-04T10:11:12+00:00",
        ended="measured",
        exit_code=None,
        error=None,
        device="cuda",
        device_name="NVIDIA H200",
        python="3.12.4",
        torch="2.13.0",
        flatout="0.1.0",
        anchor="AdamW.step",
        warmup_reason="the step time settled after 6 steps",
    )
    return dataclasses.replace(made, **changes)


def stacks() -> Stacks:
    return Stacks(
        num_steps=2,
        samples_by_phase={"forward": 120, "backward": 190, "rest": 6},
        paths=(
            StackPath(phase="backward", places=(SYNC_LINE,), samples=190),
            StackPath(phase="forward", places=(SYNC_LINE, CREATE_LINE), samples=120),
            StackPath(phase="rest", places=(SYNC_LINE,), samples=6),
        ),
        loops={str(SYNC_LINE): (44, 46)},
        differentiable=(CREATE_LINE,),
    )


def evidence(**changes: Any) -> Evidence:
    """A whole diagnosis of a job on a GPU; keyword arguments replace fields of it."""
    made = Evidence(
        job=job(),
        host=Host(cores=16.0, memory_bytes=137_438_953_472, cpu_model="AMD EPYC 9654"),
        gpu=Gpu(
            name="NVIDIA H200",
            memory_bytes=150_323_855_360,
            compute_capability="9.0",
            peak_flops={"bfloat16": 9.89e14, "float32": 6.7e13},
            bandwidth_bytes_per_s=4.8e12,
        ),
        steps=steps(),
        loaders=(loader(),),
        sites=sites(),
        module_calls=(
            ModuleCall(
                module="DarkroomTransformer",
                place=SYNC_LINE,
                calls_per_step=1.0,
                rows=512,
                training=True,
                has_parameters=True,
                host_s=3.1,
            ),
        ),
        attributed_step_s=18.9,
        attributed_calls_s={"forward": 6.2, "rest": 0.4},
        attributed_backward_s=6.8,
        kernels=kernels(),
        memory=memory(),
        stacks=stacks(),
        episodes=(
            Episode(
                kind="evaluation",
                place=SYNC_LINE,
                function="evaluate",
                seconds=9.4,
                times=2,
                num_steps=60,
                per_step_s=0.157,
                samples=230,
            ),
        ),
        counterfactuals=counterfactuals(),
        precision=Precision(
            parameter_dtypes=("float32",), autocast=None, tf32_matmul=False, bf16_supported=True
        ),
        ranks=(),
        sources=SOURCES,
        arms_not_run=(
            ArmNotRun(
                kind="knock-out",
                label="knock-out model.py:40",
                reason="no time was left for it",
                place=SYNC_LINE,
            ),
        ),
        missing=("worker memory: psutil could not read /proc of worker 1",),
    )
    return dataclasses.replace(made, **changes)


def cpu_evidence(**changes: Any) -> Evidence:
    """The same job on a machine without a GPU: no stream times, no busy share."""
    cpu_kernels = dataclasses.replace(
        kernels(),
        busy_share=None,
        gap_s=None,
        sync_gap_s=None,
        num_syncs=None,
        median_kernel_s=None,
        copies=(),
    )
    fields = {"job": job(device="cpu", device_name=None), "gpu": None, "steps": steps(device=False)}
    return evidence(**{**fields, "kernels": cpu_kernels, **changes})


def bare_evidence() -> Evidence:
    """A job that ended before anything was measured."""
    return Evidence(
        job=job(ended="crashed", error="ValueError: no data"), host=Host(cores=None, memory_bytes=None)
    )


def findings() -> tuple[Finding, ...]:
    return (
        Finding(
            code="FO302",
            name="row-indexing-in-loop",
            place=ROW_LINE,
            message="features[i, t] is read row by row, 57900 times a step; each builds a full gradient.",
            evidence=(
                "57900 calls per step under autograd",
                "1.40 s of forward and 4.10 s of backward per step",
            ),
            share=0.64,
            ceiling=Ceiling(
                step_s=2.53,
                speedup=3.4,
                speedup_low=3.2,
                speedup_high=3.6,
                kind="knock-out",
                arm="knock-out examples/darkroom/model.py:58",
                job_speedup=2.9,
            ),
            fix="Gather all rows in one indexing call with an index tensor.",
            safety="reordered",
        ),
        Finding(
            code="FO301",
            name="tensor-created-in-loop",
            place=CREATE_LINE,
            message="torch.tensor runs 512 times a step on this line.",
            evidence=("512 calls per step", "0.40 s on the host per step"),
            share=0.047,
            ceiling=None,
            no_ceiling="knock-out model.py:40: no time was left for it",
            fix="Build the tensor once, outside the loop.",
            safety="exact",
        ),
        Finding(
            code="FO202",
            name="concatenating-collate",
            place=COLLATE_LINE,
            message="The collate function grows the batch with 511 concatenations.",
            evidence=("511 calls of numpy.concatenate per batch", "collate takes 310 ms per batch"),
            share=0.042,
            ceiling=Ceiling(
                step_s=8.24,
                speedup=1.044,
                speedup_low=1.021,
                speedup_high=1.066,
                kind="cached",
                arm="cached",
            ),
            also=(Sight(code="FO101", name="single-process-loading", place=LOADER_LINE, share=0.04),),
            fix="Allocate the batch once and write each sample into its slice.",
            safety="exact",
        ),
        Finding(
            code="FO701",
            name="graph-retained-across-steps",
            place=None,
            message="An autograd graph grows by 58 nodes a step.",
            evidence=("held by history",),
            share=None,
            ceiling=None,
            fix="Append loss.detach() instead of the loss.",
            safety="exact",
        ),
    )


def diagnosis(**changes: Any) -> Diagnosis:
    made = Diagnosis(evidence=evidence(), findings=findings(), evidence_path=Path("evidence.json"))
    return dataclasses.replace(made, **changes)


HOSTILE = "<script>alert(1)</script>\"'><img src=http://example.invalid/x onerror=alert(2)>\x1b[31m\u202e"


def hostile_evidence() -> Evidence:
    """Every string that a job can choose is an attack."""
    place = Place(file=HOSTILE, line=3, function=HOSTILE)
    return evidence(
        job=job(command=(HOSTILE,), folder=HOSTILE, device_name=HOSTILE, error=HOSTILE, anchor=HOSTILE),
        loaders=(dataclasses.replace(loader(), dataset=HOSTILE, place=place, collate_place=place),),
        kernels=dataclasses.replace(
            kernels(),
            top=(Kernel(name=HOSTILE, category=HOSTILE, calls_per_step=1.0, total_s=1.0, dtype=HOSTILE),),
        ),
        memory=dataclasses.replace(
            memory(),
            growth=(
                dataclasses.replace(memory().growth[0], place=place, holder=HOSTILE, holder_place=place),
            ),
        ),
        ranks=tuple(dataclasses.replace(rank, host=HOSTILE) for rank in ranks()),
        sources={HOSTILE: {"2": "</pre></body>", "3": HOSTILE, "4": "\udcff"}},
        missing=(HOSTILE,),
    )


def hostile_findings() -> tuple[Finding, ...]:
    return (
        dataclasses.replace(
            findings()[0],
            place=Place(file=HOSTILE, line=3),
            message=HOSTILE,
            evidence=(HOSTILE,),
            fix=HOSTILE,
        ),
    )
