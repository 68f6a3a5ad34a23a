"""Runs as a monitor records them, made up: two H200 of which one idles, and a loader that slows down.

Everything follows from the second, without chance: a picture drawn from it is the same everywhere.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from flatout.ground.runs import Run, create_run, end_run
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample

GIB = 2**30
START_S = 1_768_471_200.0  # some morning in January
ROWS_PER_STEP = 64
HOSTILE = "<script>alert(1)</script>[bold red]\x1b[31m\x1b]0;owned\x07\u202etxt"


def wave(second: float, *, period_s: float = 30.0, size: float = 1.0) -> float:
    """Between -size and size, the same for the same second."""
    return size * (0.7 * math.sin(2 * math.pi * second / period_s) + 0.3 * math.sin(second * 1.7))


def phases_at(second: float, *, wait: float) -> dict[str, float]:
    waited = min(max(wait + wave(second, size=0.04), 0.0), 0.95)
    rest = 1.0 - waited
    return {
        "wait": waited,
        "transfer": 0.03 * rest,
        "forward": 0.33 * rest,
        "backward": 0.5 * rest,
        "optimizer": 0.1 * rest,
        "rest": 0.04 * rest,
    }


def gpu_at(second: float, *, wait: float, energy_j: float) -> GpuSample:
    busy = min(max(1.0 - wait + wave(second, size=0.03), 0.0), 1.0)
    return GpuSample(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-00000000-bb37-74c5-28e6-909b2c7e2234",
        utilisation_share=busy,
        sm_active_share=0.82 * busy,
        tensor_active_share=0.41 * busy,
        memory_used_bytes=int((61.4 + wave(second, period_s=60, size=0.4)) * GIB),
        memory_total_bytes=int(139.8 * GIB),
        power_w=110.0 + 520.0 * busy,
        power_limit_w=700.0,
        energy_j=energy_j,
        temperature_c=44.0 + 21.0 * busy,
        sm_clock_hz=1.98e9,
        sm_clock_max_hz=1.98e9,
        throttle_reasons=(),
        pcie_received_bytes_per_s=1.9e9 * busy,
        pcie_sent_bytes_per_s=4.1e7,
    )


def idle_gpu() -> GpuSample:
    return GpuSample(
        index=1,
        name="NVIDIA H200",
        utilisation_share=0.0,
        sm_active_share=0.0,
        memory_used_bytes=GIB // 2,
        memory_total_bytes=int(139.8 * GIB),
        power_w=78.0,
        power_limit_w=700.0,
        temperature_c=31.0,
        sm_clock_hz=3.45e8,
        sm_clock_max_hz=1.98e9,
        throttle_reasons=("idle",),
    )


def processes() -> tuple[ProcessSample, ...]:
    job = ProcessSample(
        pid=4711,
        gpu_index=0,
        name="python3",
        of_job=True,
        gpu_memory_bytes=61 * GIB,
        sm_share=0.71,
        cpu_cores=1.02,
        memory_bytes=9 * GIB,
    )
    workers = tuple(
        ProcessSample(pid=4720 + i, name="pt_data_worker", of_job=True, cpu_cores=0.93, memory_bytes=2 * GIB)
        for i in range(4)
    )
    other = ProcessSample(pid=3012, gpu_index=1, name="jupyter-lab", gpu_memory_bytes=GIB // 2, sm_share=0.0)
    return (job, *workers, other)


def story(
    *,
    seconds: int = 120,
    wait: float = 0.05,
    late_wait: float | None = None,
    step_s: float = 0.081,
    name: str = "train",
    gpus: bool = True,
) -> tuple[Sample, ...]:
    """A sample per second; from two thirds on the waits are `late_wait`."""
    found: list[Sample] = []
    steps, energy_j = 0.0, 1e6
    for second in range(seconds):
        late = late_wait is not None and second >= 2 * seconds // 3
        share = late_wait if late and late_wait is not None else wait
        took_s = step_s * (1 - wait) / (1 - share) * (1 + wave(second, size=0.02))
        steps += 1.0 / took_s
        gpu = gpu_at(second, wait=share, energy_j=energy_j)
        energy_j += gpu.power_w or 0.0
        found.append(
            Sample(
                time_s=START_S + second,
                span_s=1.0 if second else None,
                host=HostSample(
                    cpu_share=0.31 + wave(second, size=0.05) if second else None,
                    cores=32.0,
                    memory_used_bytes=int(88.5 * GIB),
                    memory_total_bytes=256 * GIB,
                    memory_limited_by="the machine",
                    shm_free_bytes=120 * GIB,
                    disk_read_bytes_per_s=2.1e8,
                    disk_write_bytes_per_s=1.2e6,
                    network_received_bytes_per_s=3.3e5,
                    network_sent_bytes_per_s=8.1e4,
                ),
                gpus=(gpu, idle_gpu()) if gpus else (),
                processes=processes() if gpus else (),
                job=JobSample(
                    pid=4711,
                    name=name,
                    steps=int(steps),
                    samples=int(steps) * ROWS_PER_STEP,
                    step_s=took_s,
                    steps_per_s=1 / took_s,
                    samples_per_s=ROWS_PER_STEP / took_s,
                    since_step_s=0.05,
                    phases=phases_at(second, wait=share),
                    device_phases=phases_at(second, wait=share) if gpus else None,
                    loss=2.1 * math.exp(-second / 70) + 0.32 + wave(second, period_s=7, size=0.02),
                    learning_rate=5.2e-5,
                    allocated_bytes=41 * GIB if gpus else None,
                    reserved_bytes=58 * GIB if gpus else None,
                    peak_allocated_bytes=55 * GIB if gpus else None,
                    gpu_index=0 if gpus else None,
                    visible_gpus=(0,) if gpus else None,
                    energy_per_step_j=(gpu.power_w or 0.0) * took_s if gpus else None,
                    energy_per_sample_j=(gpu.power_w or 0.0) * took_s / ROWS_PER_STEP if gpus else None,
                ),
                missing={} if gpus else {"gpus": "no NVIDIA driver: the NVML library is not on this machine"},
            )
        )
    return tuple(found)


def kept_run(
    root: Path, samples: tuple[Sample, ...], *, name: str = "train", pid: int = 4711, ended: bool = True
) -> Path:
    """The folder of a run with these samples in its log."""
    run = Run(
        name=name,
        pid=pid,
        process_started_s=1.0,
        started_s=samples[0].time_s if samples else START_S,
        command=("python", "train.py", "--epochs", "3"),
    )
    folder = create_run(run, root)
    writer = HistoryWriter(folder)
    for sample in samples:
        writer(sample)
    writer.close()
    if ended:
        end_run(folder, time_s=samples[-1].time_s if samples else START_S)
    return folder


# Runs of engines


def engine_run(
    root: Path, records: list[dict[str, Any]], *, kind: str, ended: bool = True, pid: int = 7
) -> Path:
    """A run as an engine keeps it: its header, its log, and a line that was cut off."""
    run = Run(
        name=f"{kind}-small",
        pid=pid,
        process_started_s=None if pid == os.getpid() else 1.0,
        started_s=START_S,
        kind=kind,
        ended_s=START_S + 90 if ended else None,
        end="finished" if ended else None,
    )
    folder = create_run(run, root)
    header = {"format": f"flatout-{kind}-log", "version": 1, "settings": {"epochs": 3}}
    lines = [json.dumps(line) for line in (header, *records)]
    (folder / "log.jsonl").write_text("\n".join(lines) + '\n{"epoch": 9, "rew')
    return folder


def epochs(*rewards: float, every_s: float = 4.0) -> list[dict[str, Any]]:
    """Reports of an evolution."""
    return [
        {
            "epoch": number,
            "epochs": len(rewards),
            "reward_train": reward / 2,
            "reward_heldout": reward,
            "failed_rows": None,
            "elapsed_s": every_s * number,
            "statistics": {"update_norm": 0.5},
        }
        for number, reward in enumerate(rewards, start=1)
    ]


def phases() -> list[dict[str, Any]]:
    """Reports of adapters: a step that was done again, and a second phase."""

    def report(phase: str, step: int, loss: float, elapsed_s: float) -> dict[str, Any]:
        return {"phase": phase, "step": step, "losses": {"qa": loss}, "elapsed_s": elapsed_s, "notes": ["x"]}

    return [
        report("phase1", 10, 2.0, 5.0),
        report("phase1", 20, 1.5, 10.0),
        report("phase1", 20, 1.25, 11.0),
        report("phase2", 5, 0.5, 3.0),
    ]
