"""NVML as it answered on an H200, played back: there is no other way to meet a lost GPU or MIG on a desk.

Error classes and constants are those of the real bindings, so that the reader catches what it would catch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

H200_UUID = "GPU-19754993-bb37-74c5-28e6-909b2c7e2234"


class Refused:
    """An answer that is an NVML error."""

    def __init__(self, code: int) -> None:
        self.code = code


NOT_SUPPORTED = Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = Refused(pynvml.NVML_ERROR_GPU_IS_LOST)
NOT_FOUND = Refused(pynvml.NVML_ERROR_NOT_FOUND)


def h200_answers() -> dict[str, Any]:
    """Every question the reader asks of a GPU, with the answer of a driver 580.159.04."""
    return {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUUID": H200_UUID,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=1, memory=0),
        "nvmlDeviceGetPowerUsage": 83511,
        "nvmlDeviceGetEnforcedPowerLimit": 700000,
        "nvmlDeviceGetClockInfo": {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201},
        "nvmlDeviceGetMaxClockInfo": {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201},
        "nvmlDeviceGetTemperatureV": {pynvml.NVML_TEMPERATURE_GPU: 38},
        "nvmlDeviceGetTemperature": {pynvml.NVML_TEMPERATURE_GPU: 38},
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetMemoryInfo": {
            None: SimpleNamespace(total=150754820096, free=149458911232, used=1295908864),
            pynvml.nvmlMemory_v2: SimpleNamespace(
                total=150754820096, reserved=644939776, free=149458911232, used=650969088
            ),
        },
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=433, usedGpuMemory=641728512)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetMaxMigDeviceCount": 0,
        "nvmlDeviceGetGpuInstanceId": Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT),
    }


def mig_answers(uuid: str, *, name: str = "NVIDIA A100-SXM4-80GB MIG 1g.10gb") -> dict[str, Any]:
    """An instance of a GPU in MIG mode."""
    gib = 2**30
    return {
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetCudaComputeCapability": (8, 0),
        "nvmlDeviceGetMemoryInfo": {
            None: SimpleNamespace(total=10 * gib, used=gib, free=9 * gib),
            pynvml.nvmlMemory_v2: SimpleNamespace(total=10 * gib, used=gib, free=9 * gib, reserved=0),
        },
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": NOT_SUPPORTED,
        "nvmlDeviceGetGpuInstanceId": 7,
        "nvmlDeviceGetComputeInstanceId": 0,
    }


@dataclass
class PlayedGpu:
    """Answers by question; `instances` are MIG slots, None an empty one; lost after so many questions."""

    answers: dict[str, Any] = field(default_factory=h200_answers)
    instances: tuple[PlayedGpu | None, ...] = ()
    lost_after: int | None = None
    num_asked: int = 0


class PlayedNvml:
    """The functions of the bindings, answering from PlayedGpus; everything else is the real module's."""

    def __init__(self, *gpus: PlayedGpu, absent: tuple[str, ...] = (), **system: Any) -> None:
        self.gpus = gpus
        self.absent = absent
        self.num_open = 0
        self.system: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount": len(gpus),
            "nvmlSystemGetProcessName": {433: "/usr/bin/python3"},
            **system,
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        if name == "nvmlDeviceGetHandleByIndex":
            return self._handle
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            return self._mig_handle
        if name in self.system:
            return lambda *arguments: _play(self.system[name], arguments)
        if name.startswith("nvmlDevice"):
            return self._question(name)
        return getattr(pynvml, name)

    def _handle(self, index: int) -> PlayedGpu:
        gpu = self.gpus[index]
        _play(gpu.answers.get("nvmlDeviceGetHandleByIndex"), ())
        return gpu

    def _mig_handle(self, gpu: PlayedGpu, index: int) -> PlayedGpu:
        instance = gpu.instances[index]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance

    def _question(self, name: str) -> Callable[..., Any]:
        def asked(gpu: PlayedGpu, *arguments: Any) -> Any:
            gpu.num_asked += 1
            if gpu.lost_after is not None and gpu.num_asked > gpu.lost_after:
                return _play(LOST, ())
            return _play(gpu.answers.get(name, NOT_SUPPORTED), arguments)

        return asked


def _play(answer: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(answer, dict):
        answer = answer.get(arguments[0] if arguments else None, NOT_FOUND)
    if isinstance(answer, Refused):
        raise pynvml.NVMLError(answer.code)
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def mig_gpu() -> PlayedGpu:
    """An A100 in MIG mode with two instances and an empty slot between them."""
    answers = h200_answers() | {
        "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetUUID": "GPU-aaaa",
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": 3,
        "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED,
    }
    first, second = PlayedGpu(answers=mig_answers("MIG-1111")), PlayedGpu(answers=mig_answers("MIG-2222"))
    second.answers["nvmlDeviceGetGpuInstanceId"] = 8
    return PlayedGpu(answers=answers, instances=(first, None, second))
