"""Kernels, copies and waits of a real GPU, against what the program is known to ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._autograd import _get_sequence_nr

from flatout.measure.device.kernels import BackwardCosts, KernelRecorder
from flatout.measure.evidence import Kernels

pytestmark = pytest.mark.gpu

NUM_STEPS = 2


@pytest.fixture
def float32_precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def recorded(step: Callable[[], Any], *, has_optimizer: bool = False) -> Kernels:
    step()  # libraries load and allocate on first use
    torch.cuda.synchronize()
    recorder = KernelRecorder("cuda")
    recorder.start()
    for _ in range(NUM_STEPS):
        step()
    return recorder.stop(NUM_STEPS, step_s=1.0, has_optimizer=has_optimizer)


@pytest.mark.parametrize(
    ("dtype", "precision", "shown"),
    [
        (torch.bfloat16, "highest", {"bf16"}),
        (torch.float16, "highest", {"fp16"}),
        (torch.float32, "highest", {"fp32"}),
        (torch.float32, "high", {"tf32", "unknown"}),  # some names hide it; none may claim another type
    ],
)
def test_large_products_fill_the_gpu_and_show_their_dtype(
    float32_precision: Callable[[str], None], dtype: torch.dtype, precision: str, shown: set[str]
) -> None:
    float32_precision(precision)
    a, b = (torch.randn(4096, 4096, device="cuda").to(dtype) for _ in range(2))

    def step() -> None:
        for _ in range(200):
            a @ b

    kernels = recorded(step)
    assert kernels.num_kernels >= 20
    assert kernels.busy_share is not None and kernels.busy_share > 0.8
    assert kernels.top[0].category == "matmul", kernels.top
    assert max(kernels.matmul_s_by_dtype, key=lambda name: kernels.matmul_s_by_dtype[name]) in shown, (
        kernels.top
    )


def test_small_kernels_leave_gaps() -> None:
    x = torch.ones(16, device="cuda")

    def step() -> None:
        for _ in range(500):
            x.add_(1)

    kernels = recorded(step)
    assert kernels.num_kernels == 500
    assert kernels.num_syncs == 0
    assert kernels.sync_gap_s == 0
    assert kernels.busy_share is not None and 0 < kernels.busy_share < 0.9
    assert kernels.gap_s is not None and kernels.gap_s > 0
    assert kernels.by_category_s.keys() == {"elementwise"}


def test_every_item_is_a_wait_and_the_gap_after_it_is_seen() -> None:
    x = torch.ones(16, device="cuda")

    def step() -> None:
        for _ in range(50):
            x.add_(1)
            x[0].item()

    kernels = recorded(step)
    assert kernels.num_syncs == 50
    assert kernels.sync_gap_s is not None and kernels.gap_s is not None
    assert 0.2 * kernels.gap_s < kernels.sync_gap_s <= kernels.gap_s
    assert sum(copy.calls_per_step for copy in kernels.copies if copy.kind.startswith("DtoH")) == 50


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_by_kind(non_blocking: bool) -> None:
    pageable, pinned = torch.ones(1 << 20), torch.ones(1 << 20).pin_memory()

    def step() -> None:
        for _ in range(3):
            pageable.to("cuda", non_blocking=non_blocking)
        pinned.to("cuda", non_blocking=True)

    kernels = recorded(step)
    by_kind = {copy.kind: copy for copy in kernels.copies}
    assert {kind: copy.calls_per_step for kind, copy in by_kind.items()} == {
        "HtoD pageable": 3,
        "HtoD pinned": 1,
    }
    assert by_kind["HtoD pageable"].bytes_per_step in (None, 3 * 4 * (1 << 20))
    assert kernels.num_syncs == 3  # pageable copies block the host, asked to or not
    assert kernels.busy_share == 0  # copies are not kernels


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"foreach": False}, "for-loop")],
)
def test_optimizer_kinds(options: dict[str, Any], kind: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 32, device="cuda")).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert recorded(step, has_optimizer=True).optimizer == kind


def test_attention_convolution_and_norms_are_told_apart() -> None:
    q = torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    image = torch.randn(8, 16, 64, 64, device="cuda")
    weight = torch.randn(16, 16, 3, 3, device="cuda")
    x = torch.randn(4096, 1024, device="cuda")

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.nn.functional.conv2d(image, weight)
        torch.nn.functional.layer_norm(x, (1024,))

    categories = recorded(step).by_category_s
    assert categories.keys() >= {"attention", "convolution", "normalisation"}


def test_backward_costs_are_the_gpus_where_it_is_the_slower_side() -> None:
    rows = torch.randn(
        50, 1 << 22, device="cuda", requires_grad=True
    )  # 800 MiB: each row's gradient is as large

    def forward() -> tuple[torch.Tensor, int, int]:
        first = _get_sequence_nr()
        taken = [rows[i] for i in range(10)]
        return torch.stack(taken).mean(), first, first + 10

    loss, *_ = forward()
    loss.backward()
    rows.grad = None
    torch.cuda.synchronize()
    costs = BackwardCosts("cuda")
    costs.start()
    loss, first, last = forward()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    loss.backward()
    end.record()
    sequence, seconds = costs.stop()
    backward_s = begin.elapsed_time(end) / 1000
    assert len(sequence) == 12 and len(seconds) == 12
    assert 0.6 * backward_s < costs.seconds_in([(first, last)]) < 1.2 * backward_s
