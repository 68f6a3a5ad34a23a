"""Joules between two countings: power adds up, and what it missed is made good without a jump."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.hardware.nvml_questions import Questions
from flatout.monitor.meters.energy import COUNTED_EVERY_S, JouleMeter
from flatout.testing.played_nvml import NOT_SUPPORTED, PlayedGpu, PlayedNvml

COUNTER, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"


class Spending:
    """A GPU that spends `watts` and says `said`, read once a second."""

    def __init__(self, *, watts: float, said: float | None) -> None:
        self.gpu = PlayedGpu()
        self.nvml = PlayedNvml(self.gpu)
        self.handle = self.nvml.nvmlDeviceGetHandleByIndex(0)
        self.meter, self.second, self.watts, self.num_counted = JouleMeter(), 0, watts, 0
        self.gpu.answers[COUNTER] = self._count
        self.gpu.answers[POWER] = NOT_SUPPORTED if said is None else round(said * 1000)

    def read(self) -> dict[str, float | None]:
        self.second += 1
        self.questions = Questions(self.nvml, self.handle)
        return self.meter.read(self.questions, float(self.second))

    def _count(self) -> int:
        self.num_counted += 1
        return round(1000 * self.watts * self.second)

    def joules(self, seconds: int) -> list[float]:
        return [value for _ in range(seconds) if (value := self.read()["energy_j"]) is not None]


def test_the_counter_is_asked_every_ten_seconds() -> None:
    spending = Spending(watts=500.0, said=500.0)
    assert spending.joules(31) == pytest.approx([500.0 * second for second in range(1, 32)])
    assert spending.num_counted == 4


@given(st.floats(0.5, 1.5))
def test_a_power_that_is_said_wrong_is_made_good(said: float) -> None:
    joules = Spending(watts=400.0, said=400.0 * said).joules(200)
    grown = [later - earlier for earlier, later in pairwise(joules)]
    assert min(grown) >= 0
    assert grown[-50:] == pytest.approx([400.0] * 50, rel=0.01)  # no second stands out
    assert joules[-1] == pytest.approx(400.0 * 200, abs=400.0 * COUNTED_EVERY_S)


def test_a_driver_that_was_restarted_counts_from_zero() -> None:
    spending = Spending(watts=500.0, said=500.0)
    spending.joules(15)
    spending.watts = 10.0
    assert spending.joules(10)[-1] < 500.0 * 15


def test_without_power_the_counter_alone_is_shown() -> None:
    spending = Spending(watts=500.0, said=None)
    assert spending.read() == {"energy_j": 500.0, "power_w": None}
    assert "power_w" in spending.questions.missing
    assert spending.joules(10)[-1] == pytest.approx(500.0 * 11)


def test_without_a_counter_joules_are_unknown_and_say_why() -> None:
    spending = Spending(watts=500.0, said=500.0)
    spending.gpu.answers[COUNTER] = NOT_SUPPORTED
    for _ in range(3):
        assert spending.read() == {"energy_j": None, "power_w": 500.0}
        assert "energy_j" in spending.questions.missing
