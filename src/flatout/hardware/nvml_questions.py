"""Single questions to NVML, each of which may be refused.

A `Questions` object speaks to one GPU.  A refusal is remembered under the names of the fields it leaves
unknown.  Once the GPU is lost no further question is asked: each would wait for a driver that has given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatout.hardware.snapshot import GpuProcess

INSTANCE_REASON = "NVML reports it for the whole GPU, not for a MIG instance"

# NVML's "not available", as the unsigned numbers of its C interface.
NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)

# Bits of the driver's reasons to hold the clocks down; "idle" is among them and is no fault.
THROTTLE_BITS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}

NvmlCall = tuple[Any, ...]  # the function's name, then its arguments after the handle


class Questions:
    """Asks NVML about one handle; without a handle, about the system."""

    def __init__(self, nvml: Any, handle: Any = None) -> None:
        self.nvml = nvml
        self.handle = handle
        self.missing: dict[str, str] = {}
        self.lost: str | None = None
        self._refusals: tuple[type[Exception], ...] = (nvml.NVMLError, UnicodeDecodeError)
        mismatch = getattr(nvml, "NVMLLibraryMismatchError", None)
        if mismatch is not None:
            self._refusals += (mismatch,)

    def ask(self, fields: Sequence[str], *calls: NvmlCall) -> Any:
        """Return the first answer; if there is none, None, with the first refusal as the fields' reason."""
        reasons: list[str] = []
        for call in calls:
            value, reason = self._ask_one(call)
            if reason is None:
                return value
            reasons.append(reason)
        self.missing.update(dict.fromkeys(fields, reasons[0]))
        return None

    def _ask_one(self, call: NvmlCall) -> tuple[Any, str | None]:
        name, *arguments = call
        if self.lost is not None:
            return None, self.lost
        function = getattr(self.nvml, name, None)
        if function is None:
            return None, f"the installed nvidia-ml-py has no {name}"
        if self.handle is not None:
            arguments = [self.handle, *arguments]
        try:
            value = function(*arguments)
        except self._refusals as error:
            reason = reason_of(error)
            gone = (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_RESET_REQUIRED)
            if getattr(error, "value", None) in gone:
                self.lost = reason
            return None, reason
        if type(value) is int and value in NOT_AVAILABLE:
            return None, "NVML has no value for it"
        return value, None


def reason_of(error: Exception) -> str:
    return f"NVML: {str(error).rstrip('.')}"


def text_of(value: str | bytes | None) -> str | None:
    """Decode an answer: old releases of nvidia-ml-py give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# Figures of a whole GPU -> what to multiply NVML's answer by, the function, and NVML's name for its argument.
SCALED: dict[str, tuple[float, str, str | None]] = {
    "power_w": (1e-3, "nvmlDeviceGetPowerUsage", None),
    "power_limit_w": (1e-3, "nvmlDeviceGetEnforcedPowerLimit", None),
    "sm_clock_hz": (1e6, "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    "sm_clock_max_hz": (1e6, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    "memory_clock_hz": (1e6, "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    "memory_clock_max_hz": (1e6, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
    "temperature_c": (1.0, "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
}
COUNTED = {
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_generation_max": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_max": "nvmlDeviceGetMaxPcieLinkWidth",
}
SHARES = ("utilisation_share", "memory_utilisation_share")
WHOLE_GPU_FIELDS = (*SHARES, *SCALED, "throttle_reasons", *COUNTED)


def read_gpu_fields(questions: Questions, *, instance: bool = False) -> dict[str, Any]:
    """Read the fields of a GpuSnapshot that one handle knows."""
    capability = questions.ask(("compute_capability",), ("nvmlDeviceGetCudaComputeCapability",))
    fields: dict[str, Any] = {
        "name": text_of(questions.ask(("name",), ("nvmlDeviceGetName",))),
        "uuid": text_of(questions.ask(("uuid",), ("nvmlDeviceGetUUID",))),
        **memory_fields(questions),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
    }
    if instance:
        questions.missing.update(dict.fromkeys(WHOLE_GPU_FIELDS, INSTANCE_REASON))
    else:
        rates = questions.ask(SHARES, ("nvmlDeviceGetUtilizationRates",))
        shares = (None, None) if rates is None else (rates.gpu / 100, rates.memory / 100)
        fields |= dict(zip(SHARES, shares, strict=True))
        fields |= {name: read_scaled(questions, name) for name in SCALED}
        fields["throttle_reasons"] = throttle_reasons(questions)
        fields |= {name: questions.ask((name,), (function,)) for name, function in COUNTED.items()}
    fields["processes"] = running_processes(questions, field="processes")
    return fields


def read_scaled(questions: Questions, name: str) -> float | None:
    """Read one figure of SCALED, in the unit of its name."""
    scale, function, argument = SCALED[name]
    arguments = () if argument is None else (getattr(questions.nvml, argument),)
    calls: list[NvmlCall] = [(function, *arguments)]
    if name == "temperature_c":  # the older function is deprecated
        calls.insert(0, ("nvmlDeviceGetTemperatureV", *arguments))
    value = questions.ask((name,), *calls)
    return None if value is None else round(value * scale, 3)


def memory_fields(questions: Questions) -> dict[str, int | None]:
    """Read total, used, free and reserved bytes, by their names in a GpuSnapshot."""
    names = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes")
    version = getattr(questions.nvml, "nvmlMemory_v2", None)
    calls: list[NvmlCall] = [("nvmlDeviceGetMemoryInfo",)]
    if version is not None:
        calls.insert(0, ("nvmlDeviceGetMemoryInfo", version))
    info = questions.ask((*names, "memory_reserved_bytes"), *calls)
    if info is None:
        return {}
    reserved = getattr(info, "reserved", None)
    if reserved is None:
        questions.missing["memory_reserved_bytes"] = "this driver counts it as used"
    values = (int(info.total), int(info.used), int(info.free))
    return {**dict(zip(names, values, strict=True)), "memory_reserved_bytes": reserved}


def throttle_reasons(questions: Questions) -> tuple[str, ...] | None:
    """Read why the driver holds the clocks down."""
    bits = questions.ask(
        ("throttle_reasons",),
        ("nvmlDeviceGetCurrentClocksEventReasons",),
        ("nvmlDeviceGetCurrentClocksThrottleReasons",),
    )
    if bits is None:
        return None
    known = tuple(reason for bit, reason in THROTTLE_BITS.items() if bits & bit)
    rest = bits & ~sum(THROTTLE_BITS)
    return (*known, f"unknown ({rest:#x})") if rest else known


def running_processes(questions: Questions, *, field: str | None = None) -> tuple[GpuProcess, ...] | None:
    """List who holds a context on a GPU; if NVML refuses, None, with its reason under `field`."""
    compute = questions.ask((field,) if field else (), ("nvmlDeviceGetComputeRunningProcesses",))
    if compute is None:
        return None
    graphics = (
        questions.ask(("graphics_processes",) if field else (), ("nvmlDeviceGetGraphicsRunningProcesses",))
        or ()
    )
    by_pid: dict[int, dict[str, int | None]] = {}
    for kind, running in (("compute", compute), ("graphics", graphics)):
        for process in running:
            by_pid.setdefault(process.pid, {})[kind] = process.usedGpuMemory
    return tuple(_process(questions, pid, used) for pid, used in sorted(by_pid.items()))


def _process(questions: Questions, pid: int, used_by_kind: dict[str, int | None]) -> GpuProcess:
    asked = Questions(questions.nvml)
    # The number may be the host's, seen from a container: only NVML can say whose it is.
    name = text_of(asked.ask(("name",), ("nvmlSystemGetProcessName", pid)))
    known = [used for used in used_by_kind.values() if used is not None]
    if not known:
        asked.missing["used_bytes"] = "the driver does not count this process's memory"
    return GpuProcess(
        pid=pid,
        name=name,
        used_bytes=max(known, default=None),
        kind=" and ".join(used_by_kind),
        missing=asked.missing,
    )
