from __future__ import annotations

from collections import Counter

import pytest
import torch

from flatout.measure.device.operators import OperatorRow, operator_rows, summarise_operators
from flatout.measure.device.recording import Recording


def recorded(num_steps: int, *, foreach: bool | None = None, fused: bool | None = None) -> list[OperatorRow]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, fused=fused)
    recording = Recording(cpu=True, cuda=False)
    for number in range(1 + num_steps):  # the first step makes the optimizer's state
        if number == 1:
            recording.start()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return operator_rows(recording.stop())


def test_nested_operators_are_not_outermost() -> None:
    rows = recorded(1)
    outermost = Counter(row.name for row in rows if row.outermost)
    assert outermost["aten::linear"] == 2
    assert outermost["aten::addmm"] == 0
    assert outermost["aten::mm"] > 0  # the backward's own operators count, inside their nodes
    assert all(row.self_ns >= 0 for row in rows)


def test_own_times_add_up_to_the_outermost_durations() -> None:
    recording = Recording(cpu=True, cuda=False)
    recording.start()
    torch.nn.functional.linear(torch.randn(4, 8), torch.randn(3, 8), torch.randn(3))
    events = recording.stop()
    rows = operator_rows(events)
    (linear,) = [event for event in events if event.name() == "aten::linear"]
    begin, end = linear.start_ns(), linear.start_ns() + linear.duration_ns()
    inside = sum(begin <= event.start_ns() <= end and "::" in event.name() for event in events)
    first = next(position for position, row in enumerate(rows) if row.name == "aten::linear")
    assert sum(row.self_ns for row in rows[first : first + inside]) == linear.duration_ns()


def test_summary() -> None:
    kernels = summarise_operators(recorded(2), num_steps=2, step_s=0.5)
    once = summarise_operators(recorded(1), num_steps=1, step_s=0.5)
    assert kernels.num_kernels == once.num_kernels
    assert (kernels.busy_share, kernels.gap_s, kernels.sync_gap_s, kernels.num_syncs) == (None,) * 4
    assert kernels.by_category_s.keys() >= {"matmul", "normalisation", "elementwise", "optimizer"}
    assert sum(kernels.by_category_s.values()) >= sum(kernel.total_s for kernel in kernels.top) * 0.999
    assert [kernel.total_s for kernel in kernels.top] == sorted(
        (k.total_s for k in kernels.top), reverse=True
    )
    assert len(kernels.top) == 20
    assert kernels.median_kernel_s is not None and kernels.median_kernel_s > 0


@pytest.mark.parametrize(
    ("foreach", "fused", "kind"), [(None, True, "fused"), (True, None, "foreach"), (False, None, "for-loop")]
)
def test_optimizer_kind(foreach: bool | None, fused: bool | None, kind: str) -> None:
    rows = recorded(1, foreach=foreach, fused=fused)
    assert summarise_operators(rows, num_steps=1, step_s=1.0).optimizer == kind


def test_nothing_recorded() -> None:
    kernels = summarise_operators([], num_steps=1, step_s=1.0)
    assert (kernels.num_kernels, kernels.median_kernel_s, kernels.optimizer, kernels.top) == (
        0,
        None,
        None,
        (),
    )
