from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flatout.measure.arms.knock_out import roofline
from flatout.measure.arms.knock_out.roofline import FlopCount, device_speeds, roofline_s


def test_products_are_counted() -> None:
    with FlopCount() as count:
        torch.ones(2, 3) @ torch.ones(3, 5) + 1
    assert count.flops == 2 * 2 * 3 * 5


def test_the_floor_is_the_slower_of_arithmetic_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "device_speeds", lambda device, dtype="fp32": (100.0, 10.0))
    assert roofline_s(flops=200.0, num_bytes=1.0, with_backward=False, device="cpu") == 2.0
    assert roofline_s(flops=200.0, num_bytes=50.0, with_backward=True, device="cpu") == 15.0


def test_the_speed_of_this_machine_is_measured_and_of_unknown_ones_not() -> None:
    speeds = device_speeds("cpu")
    assert speeds is not None and min(speeds) > 1e6
    assert roofline_s(flops=1.0, num_bytes=1.0, with_backward=False, device="mps") is None


def test_a_core_that_others_hold_at_first_makes_the_device_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six calls in a row are interrupted; the seventh shows what the device can do."""
    at_s, calls = 0.0, 0

    def work() -> None:
        nonlocal at_s, calls
        calls += 1
        at_s += 6e-3 if calls <= 6 else 1e-3

    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: at_s))
    assert roofline._fastest_s(work, "cpu") == pytest.approx(1e-3)
    assert at_s == pytest.approx(roofline.REPEATS_S, abs=2e-3)
