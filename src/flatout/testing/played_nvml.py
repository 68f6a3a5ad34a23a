"""NVML played back: GPUs for tests on machines that have none.

The default answers are a recording of an H200 under driver 580.159.04.  A test changes the answers it is
about: another name, a refusal, MIG instances, a GPU that is lost after some questions.  Error classes and
constants are those of the real bindings, so a reader catches what it catches on a real
machine.

    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
    snapshot = GpuReader(PlayedNvml(gpu), environ={}).snapshot()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

BINDINGS: Any = importlib.import_module("pynvml")
H200_UUID = "GPU-19754993-bb37-74c5-28e6-909b2c7e2234"


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer that is an NVML error."""

    code: int


NOT_SUPPORTED = RefusedAnswer(BINDINGS.NVML_ERROR_NOT_SUPPORTED)
NOT_FOUND = RefusedAnswer(BINDINGS.NVML_ERROR_NOT_FOUND)
LOST = RefusedAnswer(BINDINGS.NVML_ERROR_GPU_IS_LOST)


def h200_answers() -> dict[str, Any]:
    """Map each question to its answer; if a question takes an argument, to its answers by argument."""
    clocks = {BINDINGS.NVML_CLOCK_SM: 1980, BINDINGS.NVML_CLOCK_MEM: 3201}
    sizes = {"total": 150754820096, "free": 149458911232}
    return {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUUID": H200_UUID,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=1, memory=0),
        "nvmlDeviceGetPowerUsage": 83511,
        "nvmlDeviceGetEnforcedPowerLimit": 700000,
        "nvmlDeviceGetClockInfo": clocks,
        "nvmlDeviceGetMaxClockInfo": clocks,
        "nvmlDeviceGetTemperatureV": {BINDINGS.NVML_TEMPERATURE_GPU: 38},
        "nvmlDeviceGetTemperature": {BINDINGS.NVML_TEMPERATURE_GPU: 38},
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetMemoryInfo": {
            None: SimpleNamespace(**sizes, used=1295908864),
            BINDINGS.nvmlMemory_v2: SimpleNamespace(**sizes, used=650969088, reserved=644939776),
        },
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=433, usedGpuMemory=641728512)],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetMaxMigDeviceCount": 0,
    }


@dataclass(kw_only=True, slots=True)
class PlayedGpu:
    """A GPU or a MIG instance; a question without an answer is refused as not supported."""

    answers: dict[str, Any] = field(default_factory=h200_answers)
    instances: tuple[PlayedGpu | None, ...] = ()  # MIG slots; None is an empty one
    lost_after: int | None = None  # the number of questions it answers
    num_asked: int = 0
    gpm: dict[int, float] = field(default_factory=dict)  # performance metrics by number; empty: it has none


def played_mig_gpu() -> PlayedGpu:
    """Make an A100 in MIG mode with two instances, and an empty slot between them."""
    gpu = PlayedGpu(instances=(_instance("MIG-1111", 7), None, _instance("MIG-2222", 8)))
    gpu.answers |= {
        "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetUUID": "GPU-aaaa",
        "nvmlDeviceGetCudaComputeCapability": (8, 0),
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": 3,
        "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED,
    }
    return gpu


def _instance(uuid: str, gpu_instance: int) -> PlayedGpu:
    gib = 2**30
    info = SimpleNamespace(total=10 * gib, used=gib, free=9 * gib, reserved=0)
    return PlayedGpu(
        answers={
            "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            "nvmlDeviceGetUUID": uuid,
            "nvmlDeviceGetCudaComputeCapability": (8, 0),
            "nvmlDeviceGetMemoryInfo": {None: info, BINDINGS.nvmlMemory_v2: info},
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetGpuInstanceId": gpu_instance,
            "nvmlDeviceGetComputeInstanceId": 0,
        }
    )


class PlayedNvml:
    """Stands for the module `pynvml`; names in `absent` are missing, as in old releases of it."""

    def __init__(self, *gpus: PlayedGpu, absent: tuple[str, ...] = (), **system: Any) -> None:
        self.gpus = gpus
        self.absent = absent
        self.calls: list[str] = []
        self.system: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount": len(gpus),
            "nvmlSystemGetProcessName": {433: "python3"},
            **system,
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        if name in self.system:
            return self._system_question(name)
        if name == "nvmlDeviceGetHandleByIndex":
            return self._handle
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            return self._mig_handle
        if name.startswith("nvmlDevice"):
            return self._question(name)
        if name in _GPM:
            return _GPM[name]
        return getattr(BINDINGS, name)

    def _system_question(self, name: str) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            self.calls.append(name)
            return _play(self.system[name], arguments)

        return asked

    def _handle(self, index: int) -> PlayedGpu:
        gpu = self.gpus[index]
        _play(gpu.answers.get("nvmlDeviceGetHandleByIndex"), ())
        return gpu

    def _mig_handle(self, gpu: PlayedGpu, index: int) -> PlayedGpu:
        instance = gpu.instances[index]
        if instance is None:
            raise BINDINGS.NVMLError(BINDINGS.NVML_ERROR_NOT_FOUND)
        return instance

    def _question(self, name: str) -> Callable[..., Any]:
        def asked(gpu: PlayedGpu, *arguments: Any) -> Any:
            gpu.num_asked += 1
            if gpu.lost_after is not None and gpu.num_asked > gpu.lost_after:
                return _play(LOST, ())
            return _play(gpu.answers.get(name, NOT_SUPPORTED), arguments)

        return asked


# Performance metrics (GPM): two samples of a GPU's counters, and figures computed from both.


def _gpm_support(gpu: PlayedGpu) -> Any:
    return SimpleNamespace(isSupportedDevice=int(bool(gpu.gpm)))


def _gpm_take(gpu: PlayedGpu, sample: Any) -> Any:
    gpu.num_asked += 1
    if gpu.lost_after is not None and gpu.num_asked > gpu.lost_after:
        _play(LOST, ())
    sample.gpu = gpu
    return sample


def _gpm_request() -> Any:
    metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
    return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)


def _gpm_compute(request: Any) -> Any:
    known = request.sample2.gpu.gpm
    for metric in request.metrics[: request.numMetrics]:
        metric.nvmlReturn = 0 if metric.metricId in known else BINDINGS.NVML_ERROR_NOT_SUPPORTED
        metric.value = known.get(metric.metricId, 0.0)
    return request


_GPM: dict[str, Callable[..., Any]] = {
    "nvmlGpmQueryDeviceSupport": _gpm_support,
    "nvmlGpmSampleAlloc": lambda: SimpleNamespace(gpu=None),
    "nvmlGpmSampleFree": lambda sample: None,
    "nvmlGpmSampleGet": _gpm_take,
    "nvmlGpmMetricsGet": _gpm_compute,
    "c_nvmlGpmMetricsGet_t": _gpm_request,
}


def _play(answer: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(answer, dict):
        answer = answer.get(arguments[0] if arguments else None, NOT_FOUND)
    if callable(answer):
        answer = answer(*arguments)
    if isinstance(answer, RefusedAnswer):
        raise BINDINGS.NVMLError(answer.code)
    if isinstance(answer, Exception):
        raise answer
    return answer
