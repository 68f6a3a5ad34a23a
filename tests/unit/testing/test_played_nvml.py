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
