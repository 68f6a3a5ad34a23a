from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatout.measure.arms.reads_free import ReadsFree
from flatout.measure.clock import Clock
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


@pytest.fixture
def arm() -> Iterator[ReadsFree]:
    """The arm on a machine without a GPU: tensors of the host are the ones that are waited for."""
    arm = ReadsFree(UserCode(str(HERE.parent)), Clock(), device="cpu", suspicion=0.5)
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


def test_another_shape_is_read(arm: ReadsFree) -> None:
    assert two_steps(arm, lambda n: torch.full((n,), 1.0 * n).tolist(), 2, 3) == [[2.0] * 2, [3.0] * 3]
    assert arm.refusal is not None and "same kind of value" in arm.refusal


def test_a_size_is_read_and_a_count_is_remembered(arm: ReadsFree) -> None:
    def cut(lengths: list[int]) -> list[int]:
        longest = torch.tensor(lengths).max().item()
        return list(range(10))[:longest]

    def split(lengths: list[int]) -> int:
        return len(torch.arange(sum(lengths)).split(torch.tensor(lengths).tolist())[0])

    def count(lengths: list[int]) -> float:
        return torch.tensor(lengths).sum().item() / 2

    assert [len(row) for row in two_steps(arm, cut, [1, 2], [1, 5])] == [2, 5]  # type: ignore[arg-type]
    assert two_steps(arm, split, [1, 2], [4, 2]) == [1, 4]
    assert two_steps(arm, count, [1, 3], [5, 7]) == [2.0, 2.0]


def test_what_a_library_reads_is_left_alone(arm: ReadsFree) -> None:
    def step(scale: float) -> float:
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.full((1,), scale)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        return scale

    two_steps(arm, step, 1.0, 2.0)
    arm.begin()
    step(1.0)
    arm.step_end()
    with pytest.raises(RuntimeError, match="non-finite"):
        step(float("inf"))
    arm.end()


def test_large_tensors_gradients_and_other_threads_are_left_alone(arm: ReadsFree) -> None:
    large = 1 << 19
    sums = two_steps(arm, lambda value: torch.full((large,), value).cpu().numpy().sum(), 1.0, 2.0)
    assert sums == [large, 2 * large]
    leaf = torch.ones(2, requires_grad=True)
    moved = two_steps(arm, lambda factor: (leaf * factor).cpu().detach().numpy().sum(), 1.0, 2.0)
    assert moved == [2.0, 4.0]
    arm._clock.owner = -1
    assert two_steps(arm, lambda value: torch.tensor(value).item(), 1.0, 2.0) == [1.0, 2.0]


def test_the_end_puts_every_method_back(arm: ReadsFree) -> None:
    before = dict(vars(torch.Tensor))
    arm.begin()
    assert torch.Tensor.item is not before.get("item")
    arm.end()
    assert dict(vars(torch.Tensor)) == before
