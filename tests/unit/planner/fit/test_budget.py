from __future__ import annotations

import pytest

from flatout.errors import BadInput, UnknownDevice
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from flatout.planner.fit.budget import find_budget
from tests.support.planner import GIB


def machine(*free_bytes: int, total_bytes: int = 80 * GIB) -> Snapshot:
    gpus = tuple(
        GpuSnapshot(
            index=i,
            name="NVIDIA A100-SXM4-80GB",
            uuid=f"GPU-{i}",
            memory_total_bytes=total_bytes,
            memory_free_bytes=free,
        )
        for i, free in enumerate(free_bytes)
    )
    return Snapshot(taken_at_s=0.0, gpus=gpus)


def test_the_margin_is_of_what_is_free_and_not_of_the_total() -> None:
    budget = find_budget(margin=0.5, read=lambda: machine(20 * GIB))
    assert (budget.total_bytes, budget.free_bytes.value, budget.usable_bytes) == (
        80 * GIB,
        20 * GIB,
        10 * GIB,
    )
    assert (budget.free_bytes.source, budget.free_bytes.reason) == (
        "measured",
        "the driver reports it for GPU 0",
    )
    assert budget.device.datasheet == "A100-SXM4-80GB"


@pytest.mark.parametrize(("ranks", "expected"), [(1, 30), (2, 20), (3, 10), (8, 10)])
def test_of_several_ranks_the_fullest_gpu_decides(ranks: int, expected: int) -> None:
    budget = find_budget(ranks=ranks, read=lambda: machine(30 * GIB, 20 * GIB, 10 * GIB))
    assert budget.free_bytes.value == expected * GIB


def test_a_gpu_that_is_not_here_is_empty() -> None:
    budget = find_budget(gpu="A100-80GB", margin=0.85)
    assert budget.total_bytes == budget.free_bytes.value == budget.device.memory_bytes
    assert budget.usable_bytes == int(budget.total_bytes * 0.85)
    assert budget.free_bytes.source == "datasheet"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 10**9), ("24", 24 * 10**9), ("24GiB", 24 * GIB), ("1.5", 1_500_000_000)],
)
def test_an_amount_of_memory(text: str, expected: int) -> None:
    assert find_budget(gpu_memory=text).total_bytes == expected


def test_without_a_gpu_it_says_why_and_what_to_do() -> None:
    nothing = Snapshot(taken_at_s=0.0, missing={"gpus": "no NVIDIA driver"})
    with pytest.raises(
        BadInput, match=r"no GPU to plan for: no NVIDIA driver .*--gpu A100-80GB or --gpu-memory 24GB"
    ):
        find_budget(read=lambda: nothing)
    with pytest.raises(BadInput, match="the driver sees no GPU"):
        find_budget(read=lambda: Snapshot(taken_at_s=0.0))


@pytest.mark.parametrize("margin", [0.0, -1.0, 1.01, float("nan")])
def test_a_margin_that_is_no_share(margin: float) -> None:
    with pytest.raises(BadInput, match="is not a share of what is free"):
        find_budget(gpu="A100-80GB", margin=margin)


def test_two_devices_or_an_unknown_one() -> None:
    with pytest.raises(BadInput, match="--gpu and --gpu-memory name two devices"):
        find_budget(gpu="A100-80GB", gpu_memory="24GB")
    with pytest.raises(UnknownDevice):
        find_budget(gpu="A1000-80GB")
    with pytest.raises(BadInput, match=r"--gpu-memory 'lots' is not a size .*24GB"):
        find_budget(gpu_memory="lots")
