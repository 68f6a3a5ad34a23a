"""Traffic between a GPU and its host.

Three sources, the best first: performance metrics (an average since the last reading), byte counters of the
driver (the same, by difference), and the driver's own meter, which looks for 20 ms each way and makes the
caller wait for it.  The last is asked only when the caller may wait, and its figure stands until the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.hardware.nvml_questions import Questions

SENT, RECEIVED = "pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"
WRAP = 2**32  # some drivers keep the counters in 32 bits


@dataclass(kw_only=True, slots=True)
class PcieMeter:
    """The traffic of one GPU."""

    _counted: tuple[float, int, int] | None = None  # at which second, sent, received
    _has_counters: bool | None = None
    _metered: dict[str, float] = field(default_factory=dict)

    def read(
        self, questions: Questions, now_s: float, *, may_wait: bool, known: Mapping[str, float]
    ) -> dict[str, float]:
        """Bytes per second by field; `known` are figures that need no question."""
        if SENT in known:
            return {}
        if self._has_counters is not False:
            counters = self._counters(questions)
            self._has_counters = counters is not None
            if counters is not None:
                return self._difference(now_s, *counters)
        if may_wait:
            self._metered = _metered(questions)
        return self._metered

    def _counters(self, questions: Questions) -> tuple[int, int] | None:
        nvml = questions.nvml
        names = ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NVML_FI_DEV_PCIE_COUNT_RX_BYTES")
        numbers = [number for name in names if (number := getattr(nvml, name, None)) is not None]
        if len(numbers) < len(names):
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
        return {
            SENT: _advance(before[1], sent) / span_s,
            RECEIVED: _advance(before[2], received) / span_s,
        }


def _advance(before: int, after: int) -> int:
    return after - before if after >= before else (after - before) % WRAP


def _metered(questions: Questions) -> dict[str, float]:
    nvml = questions.nvml
    figures = {}
    for name, counter in ((SENT, nvml.NVML_PCIE_UTIL_TX_BYTES), (RECEIVED, nvml.NVML_PCIE_UTIL_RX_BYTES)):
        kb_per_s = questions.ask((name,), ("nvmlDeviceGetPcieThroughput", counter))
        if kb_per_s is not None:
            figures[name] = kb_per_s * 1e3
    return figures
