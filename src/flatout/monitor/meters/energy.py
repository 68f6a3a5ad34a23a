"""What a GPU spends: the driver's counter of joules now and then, its power in between.

The counter misses nothing, but asking for it takes the host 5 ms on an H200, where power takes 0.02 ms.  So
power times seconds is added up from one counting to the next.  What the sum was behind or ahead by then is
made good evenly until the counting after: a jump would look like one expensive step.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.hardware.nvml_questions import Questions

COUNTED_EVERY_S = 10.0


@dataclass(kw_only=True, slots=True)
class JouleMeter:
    """The joules of one GPU."""

    _read_at_s: float = 0.0
    _joules: float | None = None
    _counted_j: float | None = None
    _behind_j: float = 0.0
    _asked_at_s: float | None = None
    _refusal: str | None = None  # why the counter gives nothing

    def read(self, questions: Questions, now_s: float) -> dict[str, float | None]:
        """Joules since the driver was loaded, and watts."""
        milliwatts = questions.ask(("power_w",), ("nvmlDeviceGetPowerUsage",))
        power_w = None if milliwatts is None else milliwatts * 1e-3
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
