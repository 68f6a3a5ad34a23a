"""What a GPU's counters give between two readings: how much of it works, its traffic, its energy.

Each meter keeps where the counters stood, and `read` returns figures by their names in a GpuSample.

*Performance metrics* (GPM, Hopper and later).  NVML fills a buffer with the GPU's counters; two buffers taken
at least a tenth of a second apart give averages over the time between.

*PCIe traffic* has three sources, the best first: performance metrics, byte counters of the driver, and the
driver's own meter, which looks for 20 ms each way and makes the caller wait.  The last is asked only when the
caller may wait, and its figure stands until the next.

*Energy.*  The driver's counter misses nothing, but asking for it takes the host 5 ms on an H200, where power
takes 0.02 ms.  So power times seconds is added up from one counting to the next.  The error of the sum by
then is corrected evenly until the next reading, because a jump would look like one expensive step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.hardware.nvml_questions import Questions, read_scaled

SENT, RECEIVED = "pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"
MIB = 2**20
# Field of a GpuSample -> NVML's name for the metric, and what to multiply it by.
METRICS = {
    "sm_active_share": ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    "sm_occupancy_share": ("NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    "tensor_active_share": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    "memory_bandwidth_share": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    SENT: ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    RECEIVED: ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
}
SHORTEST_S = 0.1
NO_METRICS = "this GPU has no performance metrics (GPM); Hopper and later have them"
WRAP = 2**32  # some drivers keep the PCIe counters in 32 bits
COUNTED_EVERY_S = 10.0


class PerformanceMetrics:
    """The metrics of one GPU; `reason` says why there are none."""

    def __init__(self, questions: Questions) -> None:
        self._nvml = questions.nvml
        self._system = Questions(questions.nvml)
        self._buffers: list[Any] = []
        self._taken_at_s: float | None = None
        self.reason: str | None = None
        support = questions.ask(("gpm",), ("nvmlGpmQueryDeviceSupport",))
        if support is None:
            self.reason = questions.missing.pop("gpm")
        elif not support.isSupportedDevice:
            self.reason = NO_METRICS
        else:
            buffers = [self._system.ask(("gpm",), ("nvmlGpmSampleAlloc",)) for _ in range(2)]
            self._buffers = [buffer for buffer in buffers if buffer is not None]
            self.reason = self._system.missing.get("gpm")

    def read(self, questions: Questions, now_s: float) -> dict[str, float]:
        """Return averages since the last reading; nothing for the first."""
        before_s = self._taken_at_s
        if self.reason is not None or (before_s is not None and now_s - before_s < SHORTEST_S):
            return {}
        previous, following = self._buffers
        if questions.ask((), ("nvmlGpmSampleGet", following)) is None:
            self._taken_at_s = None
            return {}
        self._buffers, self._taken_at_s = [following, previous], now_s
        return {} if before_s is None else self._figures(previous, following)

    def _figures(self, previous: Any, following: Any) -> dict[str, float]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = previous, following
        for number, (name, _) in enumerate(METRICS.values()):
            request.metrics[number].metricId = getattr(self._nvml, name)
        answer = self._system.ask((), ("nvmlGpmMetricsGet", request))
        read = zip(METRICS.items(), answer.metrics if answer is not None else (), strict=False)
        return {name: metric.value * scale for (name, (_, scale)), metric in read if metric.nvmlReturn == 0}

    def close(self) -> None:
        for buffer in self._buffers:
            self._system.ask((), ("nvmlGpmSampleFree", buffer))
        self._buffers, self.reason = [], "closed"


@dataclass(kw_only=True, slots=True)
class PcieMeter:
    """The traffic of one GPU."""

    _counted: tuple[float, int, int] | None = None  # at which second, sent, received
    _has_counters: bool | None = None
    _metered: dict[str, float] = field(default_factory=dict)

    def read(
        self, questions: Questions, now_s: float, *, may_wait: bool, known: Mapping[str, float]
    ) -> dict[str, float]:
        """Return bytes per second; `known` are figures that need no question."""
        if SENT in known:
            return {}
        if self._has_counters is not False:
            counters = self._counters(questions)
            self._has_counters = counters is not None
            if counters is not None:
                return self._difference(now_s, *counters)
        if may_wait:
            nvml = questions.nvml
            kinds = {SENT: nvml.NVML_PCIE_UTIL_TX_BYTES, RECEIVED: nvml.NVML_PCIE_UTIL_RX_BYTES}
            asked = {
                name: questions.ask((name,), ("nvmlDeviceGetPcieThroughput", kinds[name])) for name in kinds
            }
            self._metered = {name: kb_per_s * 1e3 for name, kb_per_s in asked.items() if kb_per_s is not None}
        return self._metered

    def _counters(self, questions: Questions) -> tuple[int, int] | None:
        names = ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES")
        numbers = [getattr(questions.nvml, name, None) for name in names]
        if None in numbers:
            return None
        values = questions.ask((), ("nvmlDeviceGetFieldValues", numbers))
        if values is None or any(value.nvmlReturn != 0 for value in values):
            return None
        sent, received = (int(value.value.ullVal) for value in values)
        return sent, received

    def _difference(self, now_s: float, sent: int, received: int) -> dict[str, float]:
        before, self._counted = self._counted, (now_s, sent, received)
        if before is None or now_s <= before[0]:
            return {}
        span_s = now_s - before[0]
        return {SENT: _advance(before[1], sent) / span_s, RECEIVED: _advance(before[2], received) / span_s}


def _advance(before: int, after: int) -> int:
    return after - before if after >= before else (after - before) % WRAP


@dataclass(kw_only=True, slots=True)
class EnergyMeter:
    """The joules of one GPU."""

    _read_at_s: float = 0.0
    _joules: float | None = None
    _counted_j: float | None = None
    _behind_j: float = 0.0
    _asked_at_s: float | None = None
    _refusal: str | None = None  # why the counter gives nothing

    def read(self, questions: Questions, now_s: float) -> dict[str, float | None]:
        """Return joules since the driver was loaded, and watts."""
        power_w = read_scaled(questions, "power_w")
        if self._joules is not None and power_w is not None:
            span_s = now_s - self._read_at_s
            self._joules += max(0.0, span_s * (power_w + self._behind_j / COUNTED_EVERY_S))
        self._read_at_s = now_s
        if self._asked_at_s is None or now_s - self._asked_at_s >= COUNTED_EVERY_S:
            self._asked_at_s = now_s
            self._count(questions, by_power=power_w is not None)
        if self._refusal is not None:
            questions.missing["energy_j"] = self._refusal
        return {"energy_j": self._joules, "power_w": power_w}

    def _count(self, questions: Questions, *, by_power: bool) -> None:
        answer = questions.ask(("energy_j",), ("nvmlDeviceGetTotalEnergyConsumption",))
        self._refusal = questions.missing.get("energy_j")
        if answer is None:
            self._joules = self._counted_j = None
            return
        counted_j = answer * 1e-3
        started_again = self._counted_j is not None and counted_j < self._counted_j
        if self._joules is None or started_again or not by_power:
            self._joules = counted_j
        self._behind_j = counted_j - self._joules
        self._counted_j = counted_j
