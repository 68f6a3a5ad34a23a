"""Performance metrics: two buffers, and figures only of the time between them."""

from __future__ import annotations

import pytest

from flatout.hardware.nvml_questions import Questions
from flatout.monitor.meters.gpm import MIB, PerformanceMetrics
from flatout.testing.played_nvml import BINDINGS, PlayedGpu, PlayedNvml

GPM = {
    BINDINGS.NVML_GPM_METRIC_SM_UTIL: 55.0,
    BINDINGS.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 3.0,
}


def test_figures_are_scaled_and_a_refused_metric_is_left_out() -> None:
    gpu = PlayedGpu(gpm=GPM)
    nvml = PlayedNvml(gpu)
    questions = Questions(nvml, gpu)
    metrics = PerformanceMetrics(nvml, questions)
    assert metrics.read(questions, 1.0) == {}
    assert metrics.read(questions, 1.05) == {}  # too soon for an average
    found = metrics.read(questions, 2.0)
    assert found == pytest.approx({"sm_active_share": 0.55, "pcie_received_bytes_per_s": 3.0 * MIB})
    metrics.close()
    assert metrics.read(questions, 3.0) == {}


def test_a_gpu_that_is_lost_gives_nothing_and_begins_again() -> None:
    gpu = PlayedGpu(gpm=GPM)
    nvml = PlayedNvml(gpu)
    metrics = PerformanceMetrics(nvml, Questions(nvml, gpu))
    metrics.read(Questions(nvml, gpu), 1.0)
    gpu.lost_after = gpu.num_asked
    assert metrics.read(Questions(nvml, gpu), 2.0) == {}
    gpu.lost_after = None
    assert metrics.read(Questions(nvml, gpu), 3.0) == {}
    assert metrics.read(Questions(nvml, gpu), 4.0)


def test_old_bindings_and_old_gpus_have_a_reason() -> None:
    gpu = PlayedGpu()
    nvml = PlayedNvml(gpu)
    assert "Hopper" in (PerformanceMetrics(nvml, Questions(nvml, gpu)).reason or "")
    old = PlayedNvml(gpu, absent=("nvmlGpmQueryDeviceSupport",))
    assert "nvmlGpmQueryDeviceSupport" in (PerformanceMetrics(old, Questions(old, gpu)).reason or "")
