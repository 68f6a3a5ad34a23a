"""GPU performance metrics (GPM): how much of a GPU works, from Hopper on.

NVML fills a buffer with the GPU's counters; two buffers taken at least a tenth of a second apart give
averages over the time between.  So one buffer is kept from each reading to the next.
"""

from __future__ import annotations

from typing import Any

from flatout.hardware.nvml_questions import Questions

SHORTEST_S = 0.1
MIB = 2**20
# Field of a GpuSample -> NVML's name for the metric, and what to multiply it by.
METRICS = {
    "sm_active_share": ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    "sm_occupancy_share": ("NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    "tensor_active_share": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    "memory_bandwidth_share": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    "pcie_sent_bytes_per_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    "pcie_received_bytes_per_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
}
UNSUPPORTED = "this GPU has no performance metrics (GPM); Hopper and later have"


class PerformanceMetrics:
    """The metrics of one GPU; `reason` says why there are none."""

    def __init__(self, nvml: Any, questions: Questions) -> None:
        self._nvml = nvml
        self._system = Questions(nvml)
        self._buffers: list[Any] = []
        self._taken_at_s: float | None = None
        self.reason: str | None = None
        support = questions.ask(("gpm",), ("nvmlGpmQueryDeviceSupport",))
        if support is None:
            self.reason = questions.missing.pop("gpm")
        elif not support.isSupportedDevice:
            self.reason = UNSUPPORTED
        else:
            buffers = [self._system.ask(("gpm",), ("nvmlGpmSampleAlloc",)) for _ in range(2)]
            self._buffers = [buffer for buffer in buffers if buffer is not None]
            self.reason = self._system.missing.get("gpm")

    def read(self, questions: Questions, now_s: float) -> dict[str, float]:
        """The averages since the reading before; nothing for the first."""
        if self.reason is not None:
            return {}
        before_s = self._taken_at_s
        if before_s is not None and now_s - before_s < SHORTEST_S:
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
        for number, (name, _scale) in enumerate(METRICS.values()):
            request.metrics[number].metricId = getattr(self._nvml, name)
        answer = self._system.ask((), ("nvmlGpmMetricsGet", request))
        if answer is None:
            return {}
        read = zip(METRICS.items(), answer.metrics, strict=False)
        return {field: metric.value * scale for (field, (_, scale)), metric in read if metric.nvmlReturn == 0}

    def close(self) -> None:
        for buffer in self._buffers:
            self._system.ask((), ("nvmlGpmSampleFree", buffer))
        self._buffers, self.reason = [], "closed"
