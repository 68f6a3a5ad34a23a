"""Counters of a GPU: figures only of the time between two readings, no waiting without leave, no jumps."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.hardware.nvml_questions import Questions
from flatout.monitor.meters.gpu_counters import (
    COUNTED_EVERY_S,
    MIB,
    RECEIVED,
    SENT,
    WRAP,
    EnergyMeter,
    PcieMeter,
    PerformanceMetrics,
)
from flatout.testing.played_nvml import BINDINGS, NOT_SUPPORTED, PlayedGpu, PlayedNvml

COUNTER, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
GPM = {
    BINDINGS.NVML_GPM_METRIC_SM_UTIL: 55.0,
    BINDINGS.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 3.0,
}


def test_figures_are_scaled_and_a_refused_metric_is_left_out() -> None:
    gpu = PlayedGpu(gpm=GPM)
    nvml = PlayedNvml(gpu)
    questions = Questions(nvml, gpu)
    metrics = PerformanceMetrics(questions)
    assert metrics.read(questions, 1.0) == {}
    assert metrics.read(questions, 1.05) == {}  # too soon for an average
    found = metrics.read(questions, 2.0)
    assert found == pytest.approx({"sm_active_share": 0.55, "pcie_received_bytes_per_s": 3.0 * MIB})
    metrics.close()
    assert metrics.read(questions, 3.0) == {}


def test_a_gpu_that_is_lost_gives_nothing_and_begins_again() -> None:
    gpu = PlayedGpu(gpm=GPM)
    nvml = PlayedNvml(gpu)
    metrics = PerformanceMetrics(Questions(nvml, gpu))
    metrics.read(Questions(nvml, gpu), 1.0)
    gpu.lost_after = gpu.num_asked
    assert metrics.read(Questions(nvml, gpu), 2.0) == {}
    gpu.lost_after = None
    assert metrics.read(Questions(nvml, gpu), 3.0) == {}
    assert metrics.read(Questions(nvml, gpu), 4.0)


def test_old_bindings_and_old_gpus_have_a_reason() -> None:
    gpu = PlayedGpu()
    nvml = PlayedNvml(gpu)
    assert "Hopper" in (PerformanceMetrics(Questions(nvml, gpu)).reason or "")
    old = PlayedNvml(gpu, absent=("nvmlGpmQueryDeviceSupport",))
    assert "nvmlGpmQueryDeviceSupport" in (PerformanceMetrics(Questions(old, gpu)).reason or "")


# PCIe traffic


def counters(sent: int, received: int) -> list[Any]:
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=count)) for count in (sent, received)]


def questions_to(gpu: PlayedGpu) -> Questions:
    return Questions(PlayedNvml(gpu), gpu)


def test_counters_are_subtracted_and_may_wrap() -> None:
    gpu = PlayedGpu()
    meter = PcieMeter()
    gpu.answers["nvmlDeviceGetFieldValues"] = lambda fields: counters(100, WRAP - 10)
    assert meter.read(questions_to(gpu), 1.0, may_wait=False, known={}) == {}
    gpu.answers["nvmlDeviceGetFieldValues"] = lambda fields: counters(500, 30)
    assert meter.read(questions_to(gpu), 3.0, may_wait=False, known={}) == {SENT: 200.0, RECEIVED: 20.0}


def test_metrics_that_are_known_need_no_question() -> None:
    gpu = PlayedGpu()
    assert PcieMeter().read(questions_to(gpu), 1.0, may_wait=True, known={SENT: 5.0}) == {}
    assert gpu.num_asked == 0


def test_the_slow_meter_is_asked_only_with_leave_and_its_figure_stands() -> None:
    gpu = PlayedGpu()
    rates = {BINDINGS.NVML_PCIE_UTIL_TX_BYTES: 2000, BINDINGS.NVML_PCIE_UTIL_RX_BYTES: 7}
    gpu.answers["nvmlDeviceGetPcieThroughput"] = rates
    meter = PcieMeter()
    assert meter.read(questions_to(gpu), 1.0, may_wait=False, known={}) == {}
    expected = pytest.approx({SENT: 2e6, RECEIVED: 7e3})
    assert meter.read(questions_to(gpu), 2.0, may_wait=True, known={}) == expected
    before = gpu.num_asked
    assert meter.read(questions_to(gpu), 3.0, may_wait=False, known={}) == expected
    assert gpu.num_asked == before


# Energy


class Spending:
    """A GPU that spends `watts` and says `said`, read once a second."""

    def __init__(self, *, watts: float, said: float | None) -> None:
        self.gpu = PlayedGpu()
        self.nvml = PlayedNvml(self.gpu)
        self.handle = self.nvml.nvmlDeviceGetHandleByIndex(0)
        self.meter, self.second, self.watts, self.num_counted = EnergyMeter(), 0, watts, 0
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
