"""The sampler and the job's own events on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatout.monitor.job import watch as job_module
from flatout.monitor.job.watch import watch
from flatout.monitor.meters.gpus import HISTORY_EVERY_S, GpuMeter
from flatout.monitor.sample import GpuSample, Sample
from flatout.monitor.sampler import Sampler
from tests.support.gpu import BLOCK_BYTES, rise_of_memory

pytestmark = pytest.mark.gpu

WORK_S = HISTORY_EVERY_S + 0.5  # the driver's history is read again


@pytest.fixture
def work() -> Callable[[float], None]:
    """Matrix products that fill the GPU for some seconds."""
    import torch

    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def run(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for _ in range(10):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    run(0.1)
    return run


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    sampler = Sampler()
    yield sampler
    sampler.stop()


def gpu_of(sample: Sample) -> GpuSample:
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return next(gpu for gpu in sample.gpus if gpu.uuid == uuid)


def test_a_gpu_at_work_is_seen_at_work(sampler: Sampler, work: Callable[[float], None]) -> None:
    before = gpu_of(sampler.take())
    work(WORK_S)
    sample = sampler.take()
    after = gpu_of(sample)
    assert sample.span_s is not None and sample.span_s >= WORK_S
    assert after.utilisation_share is not None and after.utilisation_share > 0.5
    assert before.energy_j is not None and after.energy_j is not None
    spent_j = after.energy_j - before.energy_j
    assert after.power_limit_w is not None
    assert 0 < spent_j / sample.span_s < 1.1 * after.power_limit_w
    if "sm_active_share" not in after.missing:
        assert after.sm_active_share is not None and after.sm_active_share > 0.3


def test_every_figure_is_known_or_has_a_reason(sampler: Sampler, work: Callable[[float], None]) -> None:
    sampler.take()
    work(WORK_S)
    gpu = gpu_of(sampler.take())
    for name in ("utilisation_share", "sm_active_share", "memory_used_bytes", "power_w", "energy_j"):
        assert getattr(gpu, name) is not None or gpu.missing.get(name), name
    for name in ("temperature_c", "sm_clock_hz", "memory_clock_hz", "throttle_reasons"):
        assert getattr(gpu, name) is not None or gpu.missing.get(name), name


def test_an_allocation_is_seen(sampler: Sampler) -> None:
    assert rise_of_memory(lambda: gpu_of(sampler.take()).memory_used_bytes) >= 0.9 * BLOCK_BYTES


def test_a_meter_that_is_made_again_reads_again() -> None:
    """As after a driver restart: NVML is shut down and started in one process."""
    for _ in range(3):
        meter = GpuMeter()
        assert meter.read(time.monotonic(), time_s=time.time())
        assert meter.refusal is None
        meter.close()


@pytest.mark.parametrize(("gpu_s", "wait_s", "is_starved"), [(0.002, 0.02, True), (0.05, 0.005, False)])
def test_the_gpus_own_clock_says_who_waits(
    tmp_path: Path, gpu_s: float, wait_s: float, is_starved: bool
) -> None:
    import torch

    cycles_per_s = _cycles_per_s(torch)

    def batches() -> Iterator[int]:
        for number in range(40):
            time.sleep(wait_s)
            yield number

    with watch(batches(), line=False, folder=tmp_path) as watched:
        for _ in watched:
            torch.cuda._sleep(int(gpu_s * cycles_per_s))
        run = job_module._run
        assert run is not None
        torch.cuda.synchronize()
        run.reporter.write()
        device = run.reporter._device
        assert device is not None
        share = device.totals_s[0] / sum(device.totals_s)
    assert (share > 0.5) if is_starved else (share < 0.1)


def _cycles_per_s(torch: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    return float(10_000_000 / (start.elapsed_time(end) / 1e3))
