from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flatout.measure.lines.array_lists import ArrayLists, of_arrays

ROW = np.ones(3)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([ROW, ROW], True),
        ([[ROW], [ROW]], True),
        ((ROW,), True),
        (ROW, False),
        ([1.0, 2.0], False),
        ([np.float32(1.0)], False),
        ([torch.ones(1)], False),
        ([], False),
    ],
)
def test_lists_of_arrays(value: Any, expected: bool) -> None:
    assert of_arrays("tensor", (value,)) is expected
    assert not of_arrays("stack", (value,))


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list")  # once in a process
def test_every_such_call_is_told_and_made() -> None:
    told: list[str] = []
    with ArrayLists(told.append):
        made = torch.tensor([ROW, ROW])
        torch.tensor([1.0])
        torch.ones(1).new_tensor([ROW])
    assert made.shape == (2, 3) and told == ["torch.tensor of arrays", "torch.new_tensor of arrays"]
