"""The live line says what the driver said, and n/a where it said nothing."""

from __future__ import annotations

import re
from types import SimpleNamespace

from flatout.engines.adapters.training.live_line import LiveLine
from flatout.hardware.nvml import GpuReader
from flatout.testing.played_nvml import BINDINGS, NOT_SUPPORTED, PlayedGpu, PlayedNvml


def line_of(gpu: PlayedGpu, **values: float) -> str:
    with LiveLine(cuda_index=0, reader=GpuReader(PlayedNvml(gpu), environ={})) as live:
        return live.render(**values)


def t4() -> PlayedGpu:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetMemoryInfo"] = {
        each: SimpleNamespace(total=16_000_000_000, used=8_200_000_000, free=7_800_000_000, reserved=0)
        for each in (None, BINDINGS.nvmlMemory_v2)
    }
    gpu.answers["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=85, memory=0)
    return gpu


def test_memory_utilisation_cpu_and_loss() -> None:
    line = line_of(t4(), loss=0.32451, lr=5.2e-5, steps_per_s=12.3)
    assert line.startswith("GPU 8.2/16.0 GB (51 %) | util 85 % | CPU ")
    assert line.endswith(" | loss 0.3245 | lr 5.2e-05 | 12.3 it/s")


def test_what_the_driver_refuses_is_not_zero() -> None:
    gpu = t4()
    gpu.answers["nvmlDeviceGetUtilizationRates"] = NOT_SUPPORTED
    gpu.answers["nvmlDeviceGetMemoryInfo"] = NOT_SUPPORTED
    assert line_of(gpu).startswith("GPU n/a | util n/a | CPU ")
    assert line_of(gpu).endswith("loss n/a")


def test_a_gpu_that_is_not_found_is_unknown() -> None:
    with LiveLine(cuda_index=3, reader=GpuReader(PlayedNvml(t4()), environ={})) as live:
        assert live.render().startswith("GPU n/a | util n/a")


def test_without_a_gpu_the_line_has_none() -> None:
    with LiveLine(cuda_index=None) as live:
        assert re.fullmatch(r"CPU [\d.]+ % \| loss 1 \| 4 s/it", live.render(loss=1.0, steps_per_s=0.25))
