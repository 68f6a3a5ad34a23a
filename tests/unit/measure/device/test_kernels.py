from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import _get_sequence_nr
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.measure.device.kernels import (
    BackwardCosts,
    KernelRecorder,
    device_ns_by_node,
    host_waits,
    idle_after,
    summarise_device,
    timeline,
)
from flatout.measure.device.overlap import covered_length, merge_intervals

Rows = list[tuple[str, int, int, int, int]]

GEMM = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
# One step of 1000 ns: a pageable copy, two overlapping kernels, a wait, a third kernel.
DEVICE: Rows = [
    (PAGEABLE, 50, 100, 1, 4096),
    (GEMM, 200, 300, 2, -1),
    (ADD, 250, 400, 3, -1),
    ("Memset (Device)", 420, 440, 4, -1),
    (ADD, 700, 800, 6, -1),
]
HOST: Rows = [
    ("cudaMemcpyAsync", 40, 110, 1, -1),
    ("cudaStreamSynchronize", 112, 120, 0, -1),
    ("cudaLaunchKernel", 130, 135, 2, -1),
    ("cudaLaunchKernel", 140, 145, 3, -1),
    ("cudaMemsetAsync", 150, 155, 4, -1),
    ("cudaDeviceSynchronize", 210, 450, 5, -1),
    ("cudaLaunchKernel", 690, 695, 6, -1),
]


def test_a_step_on_a_device() -> None:
    kernels = summarise_device(
        timeline(DEVICE), timeline(HOST), window_ns=1000, num_steps=1, step_s=1e-6, has_optimizer=True
    )
    assert kernels.step_s == pytest.approx(1e-6)
    assert kernels.busy_share == pytest.approx(0.3)
    assert kernels.gap_s == pytest.approx(700e-9)
    assert kernels.num_kernels == 3
    assert kernels.median_kernel_s == pytest.approx(100e-9)
    assert kernels.num_syncs == 2  # the pageable copy and the synchronisation after it are one wait
    assert kernels.sync_gap_s == pytest.approx((200 - 120 + 700 - 450) * 1e-9)
    assert kernels.by_category_s == pytest.approx({"copy": 70e-9, "matmul": 100e-9, "elementwise": 250e-9})
    assert kernels.matmul_s_by_dtype == pytest.approx({"fp32": 100e-9})
    ahead = summarise_device(
        timeline(DEVICE), timeline(HOST), window_ns=1000, num_steps=1, step_s=1e-7, has_optimizer=True
    )
    assert ahead.step_s == pytest.approx(1e-6)  # the host ran ahead of the GPU
    assert kernels.top[0].name == ADD and kernels.top[0].calls_per_step == 2
    (copy,) = kernels.copies
    assert (copy.kind, copy.calls_per_step, copy.bytes_per_step) == ("HtoD pageable", 1, 4096)
    assert copy.total_s == pytest.approx(50e-9)
    assert kernels.optimizer == "for-loop"


def test_per_step_figures_are_means() -> None:
    later = [
        (name, start + 1000, end + 1000, correlation + 100, size)
        for name, start, end, correlation, size in DEVICE
    ]
    calls = [
        (name, start + 1000, end + 1000, correlation + 100, size)
        for name, start, end, correlation, size in HOST
    ]
    one = summarise_device(
        timeline(DEVICE), timeline(HOST), window_ns=1000, num_steps=1, step_s=1e-6, has_optimizer=False
    )
    two = summarise_device(
        timeline(DEVICE + later),
        timeline(HOST + calls),
        window_ns=2000,
        num_steps=2,
        step_s=1e-6,
        has_optimizer=False,
    )
    assert two.by_category_s == pytest.approx(one.by_category_s)
    assert (two.busy_share, two.num_kernels, two.num_syncs) == (one.busy_share, 3, 2)
    assert two.sync_gap_s == pytest.approx(one.sync_gap_s)
    assert two.optimizer is None


def test_a_device_that_did_nothing() -> None:
    kernels = summarise_device(
        timeline([]), timeline([]), window_ns=1000, num_steps=1, step_s=1e-6, has_optimizer=True
    )
    assert (kernels.busy_share, kernels.median_kernel_s, kernels.num_syncs) == (0.0, None, 0)
    assert (kernels.optimizer, kernels.top, kernels.copies) == (None, (), ())


def test_a_copy_of_unknown_size_has_no_bytes() -> None:
    device = timeline([(PAGEABLE, 0, 10, 1, -1)])
    kernels = summarise_device(
        device, timeline([]), window_ns=100, num_steps=1, step_s=1e-7, has_optimizer=True
    )
    assert kernels.copies[0].bytes_per_step is None


def test_an_asynchronous_pageable_copy_is_a_wait_and_a_pinned_one_is_not() -> None:
    host = timeline([("cudaMemcpyAsync", 0, 10, 1, -1), ("cudaMemcpyAsync", 20, 30, 2, -1)])
    copies = timeline([(PAGEABLE, 2, 8, 1, 64), ("Memcpy HtoD (Pinned -> Device)", 30, 40, 2, 64)])
    assert host_waits(host, copies).tolist() == [[0, 10]]


def test_a_wait_while_the_device_works_costs_no_gap() -> None:
    starts, ends = np.array([0, 200]), np.array([100, 300])
    assert idle_after(np.array([[50, 50]]), starts, ends) == 0
    assert idle_after(np.array([[150, 150]]), starts, ends) == 50
    assert idle_after(np.array([[120, 120], [150, 150]]), starts, ends) == 80
    assert idle_after(np.array([[400, 400]]), starts, ends) == 0


def test_a_wait_costs_later_gaps_as_far_as_it_took() -> None:
    """The host was ahead by what the wait took; small kernels then come one launch after the other."""
    starts, ends = np.array([0, 110, 120, 130]), np.array([100, 112, 122, 132])
    assert idle_after(np.array([[10, 100]]), starts, ends) == 10 + 8 + 8
    assert idle_after(np.array([[80, 100]]), starts, ends) == 20
    assert idle_after(np.array([[99, 100]]), starts, ends) == 10  # launches bound it without the wait, too
    assert idle_after(np.array([[10, 100], [114, 115]]), starts, ends) == (10 + 3) + 5
    # before the first wait of a recording comes the last one of the step before
    assert idle_after(np.array([[114, 132]]), starts, ends) == 18


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), max_size=40))
def test_merged_intervals_cover_the_same_points(spans: list[tuple[int, int]]) -> None:
    spans.sort()
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    ends = np.array([start + length for start, length in spans], dtype=np.int64)
    union_starts, union_ends = merge_intervals(starts, ends)
    covered = {point for start, length in spans for point in range(start, start + length)}
    again = [
        point for start, end in zip(union_starts, union_ends, strict=True) for point in range(start, end)
    ]
    assert sorted(covered) == again


def training_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_recording_between_the_boundaries_of_a_training_loop() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    recorder = KernelRecorder("cpu")
    found = []
    boundaries = 0

    def boundary(*_: object) -> None:
        nonlocal boundaries
        boundaries += 1
        if boundaries == 2:
            recorder.start()
        elif boundaries == 4:
            found.append(recorder.stop(2, step_s=0.25))

    handle = register_optimizer_step_post_hook(boundary)
    try:
        for _ in range(6):
            training_step(model, optimizer)
    finally:
        handle.remove()
    (kernels,) = found
    assert (kernels.num_steps, kernels.step_s, kernels.optimizer) == (2, 0.25, "for-loop")
    (linear,) = [kernel for kernel in kernels.top if kernel.name == "aten::addmm"]
    assert linear.calls_per_step == 1


def test_a_recording_without_a_step_is_an_error_and_still_ends() -> None:
    recorder = KernelRecorder("cpu")
    recorder.start()
    with pytest.raises(RuntimeError, match="no step"):
        recorder.stop(0, step_s=0.0)
    again = KernelRecorder("cpu")
    again.start()
    torch.ones(3).sin()
    assert again.stop(1, step_s=1.0).num_kernels == 2


def test_backward_seconds_are_found_by_the_numbers_a_line_consumed() -> None:
    rows = torch.randn(1000, 64, requires_grad=True)
    shares = []
    for _ in range(5):  # what the machine does beside falls into few of the passes
        costs = BackwardCosts("cpu")
        costs.start()
        first = _get_sequence_nr()
        taken = [rows[i] for i in range(400)]
        middle = _get_sequence_nr()
        loss = torch.stack(taken).mean()
        last = _get_sequence_nr()
        loss.backward()
        sequence, seconds = costs.stop()
        assert middle - first == 400 and (np.diff(sequence) >= 0).all()
        assert len(sequence) == last - first
        total = costs.seconds_in([(first, last)])
        assert total == pytest.approx(float(seconds.sum()))
        shares.append(costs.seconds_in([(first, middle)]) / total)
    assert max(shares) > 0.4  # every SelectBackward0 fills a full gradient
    halves = [(first, first + 200), (first + 200, middle)]
    assert costs.seconds_in(halves) == pytest.approx(costs.seconds_in([(first, middle)]))
    assert costs.seconds_in([]) == 0.0
    assert costs.seconds_in([(last, last + 10)]) == 0.0


def test_a_nodes_seconds_include_the_accumulation_of_its_output() -> None:
    rows = torch.randn(1000, 64, requires_grad=True)
    costs = BackwardCosts("cpu")
    costs.start()
    torch.stack([rows[i] for i in range(100)]).mean().backward()
    events = costs._recording.stop()
    own_ns = sum(event.duration_ns() for event in events if event.scope() == 1 and event.sequence_nr() >= 0)
    _sequence, _start_ns, host_ns = costs._nodes(events)
    assert host_ns.sum() > own_ns


def test_two_passes_do_not_charge_the_time_between_them_to_a_node() -> None:
    x = torch.ones(3, requires_grad=True)
    costs = BackwardCosts("cpu")
    costs.start()
    torch.autograd.grad(x.sin().sum(), x)
    torch.autograd.grad(x.sin().sum(), x)
    events = costs._recording.stop()
    sines = [event for event in events if event.name() == "SinBackward0"]
    sequence, _start_ns, host_ns = costs._nodes(events)
    assert [int(host_ns[sequence == sine.sequence_nr()][0]) for sine in sines] == [
        sine.duration_ns() for sine in sines
    ]


def test_a_reentrant_checkpoint_is_counted_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)
    shares = []
    for _ in range(5):  # what the machine does between two nodes falls into few of the passes
        costs = BackwardCosts("cpu")
        costs.start()
        y = torch.utils.checkpoint.checkpoint(lambda x: (x @ weight).relu() @ weight, x, use_reentrant=True)
        y.sum().backward()
        events = costs._recording.stop()
        nodes = np.array(
            [(each.start_ns(), each.start_ns() + each.duration_ns()) for each in events if each.scope() == 1]
        )
        _sequence, _start_ns, host_ns = costs._nodes(events)
        assert (nodes[:, 1] - nodes[:, 0]).sum() > covered_length(nodes)  # they are nested
        shares.append(host_ns.sum() / (nodes[:, 1].max() - nodes[:, 0].min()))
    assert 0.5 < max(shares) <= 1


def test_kernels_belong_to_the_node_that_launched_them() -> None:
    start_ns, host_ns = np.array([0, 100, 200]), np.array([100, 50, 100])
    host = timeline([("cudaLaunchKernel", at, at + 2, at, -1) for at in (10, 20, 120, 170, 400)])
    device = timeline([(GEMM, 1000 + at, 1000 + at + 7, at, -1) for at in (10, 20, 120, 170, 400, 999)])
    assert device_ns_by_node(start_ns, host_ns, device, host).tolist() == [14, 7, 0]


def test_a_million_nodes() -> None:
    costs = BackwardCosts("cpu")
    costs._sequence = np.arange(1_000_000)
    costs._reached_s = np.linspace(0.0, 1.0, 1_000_001)
    intervals = np.stack([np.arange(0, 1_000_000, 2), np.arange(1, 1_000_001, 2)], axis=1)
    assert costs.seconds_in(intervals) == pytest.approx(0.5)
