"""A machine that is played: GPUs, clocks and a job that reports through a real channel."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flatout.ground.runs import CHANNEL_FILE, Run, create_run
from flatout.measure import PHASES
from flatout.monitor.job.channel import SCALARS
from flatout.monitor.job.reporter import ChannelWriter
from flatout.monitor.meters.gpus import GpuMeter
from flatout.monitor.sample import Sample
from flatout.monitor.sampler import Sampler
from flatout.testing.played_nvml import BINDINGS, PlayedGpu, PlayedNvml

NAN = float("nan")
GIB = 2**30
START_S = 1_700_000_000.0


@dataclass
class PlayedClock:
    """Seconds that pass when a test says so."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return START_S + self.now_s


class PlayedJob:
    """A job of this process that writes a real channel; seconds are totals."""

    def __init__(self, root: Path, clock: PlayedClock, *, visible_devices: str | None = None) -> None:
        run = Run(
            name="train",
            pid=os.getpid(),
            process_started_s=None,
            started_s=clock.wall(),
            visible_devices=visible_devices,
        )
        self.folder = create_run(run, root)
        self.writer = ChannelWriter(self.folder / CHANNEL_FILE)
        self.clock = clock
        self.scalars: dict[str, float] = dict.fromkeys(SCALARS, NAN) | {
            "steps": 0.0,
            "samples": 0.0,
            "ended": 0.0,
            "sees_data": 1.0,
        }
        self.host_s = dict.fromkeys(PHASES, 0.0)
        self.device_s: dict[str, float] | None = None
        self.gpu_id = b""
        self.device_name = b""  # of a GPU that NVML does not know

    def advance(self, *, steps: int = 1, device: dict[str, float] | None = None, **host_s: float) -> None:
        """Some steps that spent `host_s`, and of the GPU's time `device`."""
        self.scalars["steps"] += steps
        self.scalars["samples"] += 32 * steps
        for phase, seconds in host_s.items():
            self.host_s[phase] += seconds
        if device is not None:
            self.device_s = self.device_s or dict.fromkeys(PHASES, 0.0)
            for phase, seconds in device.items():
                self.device_s[phase] += seconds
        self.write()

    def write(self) -> None:
        self.scalars["time_s"] = self.clock.wall()
        device = [NAN] * len(PHASES) if self.device_s is None else list(self.device_s.values())
        self.writer.write(
            [self.scalars[name] for name in SCALARS],
            list(self.host_s.values()),
            device,
            self.gpu_id,
            self.device_name,
        )


def history_of(value: float, clock: PlayedClock) -> Any:
    """What the driver's own history answers: two values since the last reading."""
    now_us = int(clock.wall() * 1e6)
    values = [
        SimpleNamespace(timeStamp=now_us - back_us, sampleValue=SimpleNamespace(uiVal=int(value)))
        for back_us in (300_000, 100_000)
    ]
    return (BINDINGS.NVML_VALUE_TYPE_UNSIGNED_INT, values)


def played_gpu(
    clock: PlayedClock, *, number: int = 0, busy: float = 95, sm: float | None = 80, used: float = 8 * GIB
) -> PlayedGpu:
    """An H200 at work; its utilisation comes from the driver's own history."""
    gpu = PlayedGpu(gpm={} if sm is None else {BINDINGS.NVML_GPM_METRIC_SM_UTIL: sm})
    uuid = f"GPU-0000000{number}-bb37-74c5-28e6-909b2c7e2234"
    gpu.answers |= {
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=busy, memory=0),
        "nvmlDeviceGetSamples": lambda kind, since: _samples(kind, busy, clock),
        "nvmlDeviceGetTotalEnergyConsumption": lambda: int(500_000 * clock.now_s),  # 500 W
        "nvmlDeviceGetPowerUsage": 500_000,
    }
    set_memory(gpu, used)
    return gpu


def _samples(kind: int, busy: float, clock: PlayedClock) -> Any:
    if kind == BINDINGS.NVML_GPU_UTILIZATION_SAMPLES:
        return history_of(busy, clock)
    raise BINDINGS.NVMLError(BINDINGS.NVML_ERROR_NOT_SUPPORTED)


def set_memory(gpu: PlayedGpu, used: float) -> None:
    info = SimpleNamespace(total=140 * GIB, used=int(used), free=int(140 * GIB - used), reserved=0)
    gpu.answers["nvmlDeviceGetMemoryInfo"] = {None: info, BINDINGS.nvmlMemory_v2: info}


@dataclass
class Played:
    """A sampler over played GPUs and a played job, and the clock of both."""

    root: Path
    clock: PlayedClock = field(default_factory=PlayedClock)
    gpus: list[PlayedGpu] = field(default_factory=list)
    job: PlayedJob | None = None
    nvml: PlayedNvml | None = None

    def sampler(self, **options: Any) -> Sampler:
        self.nvml = PlayedNvml(*self.gpus)
        return Sampler(
            gpus=GpuMeter(self.nvml),
            job=None if self.job is None else self.job.folder,
            clock=self.clock,
            wall_clock=self.clock.wall,
            **options,
        )

    def run(
        self, sampler: Sampler, each_second: Callable[[int], None], *, seconds: int = 40
    ) -> tuple[Sample, ...]:
        """A sample per second; `each_second` plays what happened in it."""
        sampler.take()
        for number in range(seconds):
            self.clock.now_s += 1.0
            each_second(number)
            sampler.take()
        return sampler.recent()
