from __future__ import annotations

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
