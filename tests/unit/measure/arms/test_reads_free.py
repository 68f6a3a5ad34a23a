from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.measure.arms.reads_free import ReadsFree, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import Kernels, Place, Site
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


def make() -> ReadsFree:
    """The arm on a machine without a GPU: tensors of the host are the ones that are waited for."""
    return ReadsFree(UserCode(str(HERE.parent)), Clock(), device="cpu", suspicion=0.5)


@pytest.fixture
def arm() -> Iterator[ReadsFree]:
    arm = make()
    yield arm
    arm.end()


def two_steps(arm: ReadsFree, step: object, *values: object) -> list[object]:
    arm.begin()
    read = []
    for value in values:
        read.append(step(value))  # type: ignore[operator]
        arm.step_end()
    arm.end()
    return read


READERS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: "high" if x.sum() > 5 else "low",
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu().sum().numpy().item(),
    "to": lambda x: float(x.to("cpu").numpy().sum()),
    "format": lambda x: f"{x.sum():.1f}",
    "print": lambda x: f"{x!s}",
    "in": lambda x: 9.0 in x,
}


@pytest.mark.parametrize("name", READERS)
def test_a_line_reads_what_it_read_in_the_first_step(arm: ReadsFree, name: str) -> None:
    first, later = torch.ones(3), torch.full((3,), 9.0)
    fresh = READERS[name](later)
    read = two_steps(arm, READERS[name], first, later)
    assert read == [READERS[name](first)] * 2 and read[1] != fresh
    assert READERS[name](later) == fresh and arm.refusal is None


def test_each_call_of_a_line_has_its_own_value_and_calls_beyond_are_read(arm: ReadsFree) -> None:
    def step(values: list[float]) -> list[float]:
        return [torch.tensor(value).item() for value in values]

    assert two_steps(arm, step, [1.0, 2.0], [5.0, 6.0, 7.0]) == [[1.0, 2.0], [1.0, 2.0, 7.0]]


def test_a_loop_that_reads_until_it_is_done_ends(arm: ReadsFree) -> None:
    def step(enough: float) -> int:
        x, rounds = torch.zeros(()), 0
        while not x >= enough:
            x, rounds = x + 1, rounds + 1
        return rounds

    assert two_steps(arm, step, 3.0, 10.0) == [3, 3]


def test_a_step_in_which_nothing_was_remembered_does_not_count(arm: ReadsFree) -> None:
    arm.begin()
    torch.ones(1).item()
    arm.step_end()
    assert arm.fell_back
    for value in (1.0, 2.0):
        torch.full((), value).item()
        arm.step_end()
    arm.end()
    assert arm.fell_back


def test_another_shape_is_read(arm: ReadsFree) -> None:
    assert two_steps(arm, lambda n: torch.full((n,), 1.0 * n).tolist(), 2, 3) == [[2.0] * 2, [3.0] * 3]
    assert arm.refusal is not None and "same kind of value" in arm.refusal


def test_a_size_is_read_and_a_count_is_remembered() -> None:
    def cut(lengths: list[int]) -> list[int]:
        longest = torch.tensor(lengths).max().item()
        return list(range(10))[:longest]

    def split(lengths: list[int]) -> int:
        return len(torch.arange(sum(lengths)).split(torch.tensor(lengths).tolist())[0])

    def count(lengths: list[int]) -> float:
        return torch.tensor(lengths).sum().item() / 2

    assert [len(row) for row in two_steps(make(), cut, [1, 2], [1, 5])] == [2, 5]  # type: ignore[arg-type]
    assert two_steps(make(), split, [1, 2], [4, 2]) == [1, 4]
    assert two_steps(make(), count, [1, 3], [5, 7]) == [2.0, 2.0]


def test_what_a_library_reads_is_left_alone(arm: ReadsFree) -> None:
    def step(scale: float) -> float:
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.full((1,), scale)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        return scale

    arm.begin()
    step(1.0)
    arm.step_end()
    with pytest.raises(RuntimeError, match="non-finite"):
        step(float("inf"))
    arm.end()


def test_large_tensors_gradients_and_other_threads_are_left_alone(arm: ReadsFree) -> None:
    large = 1 << 19
    sums = two_steps(make(), lambda value: torch.full((large,), value).cpu().numpy().sum(), 1.0, 2.0)
    assert sums == [large, 2 * large]
    leaf = torch.ones(2, requires_grad=True)
    moved = two_steps(make(), lambda factor: (leaf * factor).cpu().detach().numpy().sum(), 1.0, 2.0)
    assert moved == [2.0, 4.0]
    arm._clock.owner = -1
    assert two_steps(arm, lambda value: torch.tensor(value).item(), 1.0, 2.0) == [1.0, 2.0]


def test_the_end_puts_every_method_back(arm: ReadsFree) -> None:
    before = dict(vars(torch.Tensor))
    arm.begin()
    assert torch.Tensor.item is not before.get("item")
    arm.end()
    assert dict(vars(torch.Tensor)) == before


def kernels(**changes: Any) -> Kernels:
    figures = {"busy_share": 0.5, "gap_s": 0.5, "sync_gap_s": 0.2, "num_syncs": 2.0, **changes}
    return Kernels(
        num_steps=1,
        step_s=1.0,
        num_kernels=9,
        median_kernel_s=1e-5,
        by_category_s={},
        matmul_s_by_dtype={},
        top=(),
        **figures,
    )


def read(line: int, calls_per_step: float, **changes: Any) -> Site:
    place = Place(file="train.py", line=line)
    facts = {"kind": "sync", "op": "item", "via": None, "device": "cuda", **changes}
    return Site(place=place, calls_per_step=calls_per_step, **facts)


def test_reads_after_which_the_gpu_is_idle_are_proposed(context: Any) -> None:
    sites = (read(3, 1.0), read(5, 8.0), read(7, 99.0, via="torch/amp/grad_scaler.py:1"))
    (arm,) = propose(context(device="cuda", sites=sites, kernels=kernels()))
    assert arm.place == Place(file="train.py", line=5)
    assert arm.suspicion == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("device", "site", "found"),
    [
        ("cpu", read(3, 8.0, device="cpu"), None),
        ("cuda", read(3, 8.0), kernels(sync_gap_s=0.0)),
        ("cuda", read(3, 0.1), kernels()),
        ("cuda", read(3, 8.0, via="torch/amp/grad_scaler.py:1"), kernels()),
    ],
    ids=["cpu", "no gap", "seldom", "a library's"],
)
def test_other_reads_are_not_proposed(context: Any, device: str, site: Site, found: Kernels | None) -> None:
    assert list(propose(context(device=device, sites=(site,), kernels=found))) == []
