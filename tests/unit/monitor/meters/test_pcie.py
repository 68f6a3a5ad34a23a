"""Traffic by the best source that answers, and no waiting without leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.hardware.nvml_questions import Questions
from flatout.monitor.meters.pcie import RECEIVED, SENT, WRAP, PcieMeter
from flatout.testing.played_nvml import BINDINGS, PlayedGpu, PlayedNvml


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
