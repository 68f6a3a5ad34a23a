"""The playback must speak as the bindings do, or tests on it prove nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flatout.hardware
from flatout.testing.played_nvml import (
    BINDINGS,
    LOST,
    NOT_SUPPORTED,
    PlayedGpu,
    PlayedNvml,
    h200_answers,
    played_mig_gpu,
)


def test_every_recorded_question_is_one_of_the_bindings() -> None:
    for question in (*h200_answers(), *PlayedNvml().system, "nvmlDeviceGetHandleByIndex"):
        assert callable(getattr(BINDINGS, question)), question


def test_every_question_of_the_room_is_one_of_the_bindings() -> None:
    room = Path(flatout.hardware.__file__).parent
    asked = {
        name
        for path in room.glob("*.py")
        for name in re.findall(r'"(nvml(?:Device|System)\w+)"', path.read_text())
    }
    assert len(asked) > 15
    assert not [name for name in asked if not callable(getattr(BINDINGS, name))]


def test_refusals_are_the_errors_of_the_bindings() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
    gpu.answers["nvmlDeviceGetName"] = LOST
    nvml = PlayedNvml(gpu)
    with pytest.raises(BINDINGS.NVMLError_NotSupported):
        nvml.nvmlDeviceGetPowerUsage(gpu)
    with pytest.raises(BINDINGS.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetName(gpu)
    with pytest.raises(BINDINGS.NVMLError_NotSupported):
        nvml.nvmlDeviceGetFanSpeed(gpu)


def test_a_gpu_is_lost_after_the_given_number_of_questions() -> None:
    gpu = PlayedGpu(lost_after=1)
    nvml = PlayedNvml(gpu)
    assert nvml.nvmlDeviceGetName(gpu) == "NVIDIA H200"
    with pytest.raises(BINDINGS.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetName(gpu)


def test_absent_names_are_absent_and_constants_are_real() -> None:
    nvml = PlayedNvml(absent=("nvmlMemory_v2",))
    assert not hasattr(nvml, "nvmlMemory_v2")
    assert nvml.NVML_ERROR_GPU_IS_LOST == BINDINGS.NVML_ERROR_GPU_IS_LOST


def test_an_empty_mig_slot_is_not_found() -> None:
    gpu = played_mig_gpu()
    nvml = PlayedNvml(gpu)
    assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0) is gpu.instances[0]
    with pytest.raises(BINDINGS.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)


def test_system_questions_are_counted() -> None:
    nvml = PlayedNvml()
    nvml.nvmlInit()
    assert nvml.calls == ["nvmlInit"]


def test_performance_metrics_are_asked_as_the_bindings_ask_them() -> None:
    metric = BINDINGS.NVML_GPM_METRIC_SM_UTIL
    gpu, without = PlayedGpu(gpm={metric: 40.0}), PlayedGpu()
    nvml = PlayedNvml(gpu)
    for name in ("nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree"):
        assert callable(getattr(BINDINGS, name))
    assert (nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice, 0) == (
        1,
        nvml.nvmlGpmQueryDeviceSupport(without).isSupportedDevice,
    )
    request = nvml.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2", "metrics"} <= vars(request).keys()
    assert all(hasattr(BINDINGS.c_nvmlGpmMetricsGet_t, name) for name in vars(request))
    request.sample1, request.sample2 = (
        nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc()) for _ in range(2)
    )
    request.numMetrics = 2
    request.metrics[0].metricId = metric
    request.metrics[1].metricId = BINDINGS.NVML_GPM_METRIC_FP64_UTIL
    answer = nvml.nvmlGpmMetricsGet(request)
    assert (answer.metrics[0].nvmlReturn, answer.metrics[0].value) == (0, 40.0)
    assert answer.metrics[1].nvmlReturn == BINDINGS.NVML_ERROR_NOT_SUPPORTED
    gpu.lost_after = gpu.num_asked
    with pytest.raises(BINDINGS.NVMLError_GpuIsLost):
        nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())


def test_an_answer_may_be_made_when_it_is_asked_for() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetClockInfo"] = lambda kind: kind + 1
    assert PlayedNvml(gpu).nvmlDeviceGetClockInfo(gpu, 41) == 42
