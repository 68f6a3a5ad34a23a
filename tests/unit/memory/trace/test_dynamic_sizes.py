"""Results sized by values: true where these are known, the largest where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.memory.trace.dynamic_sizes import declare, depends_on_values
from tests.support.memory import under_rules

aten = torch.ops.aten


def shapes(*tensors: Tensor) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


def of_known() -> list[list[int]]:
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    x = torch.randn(2, 3, 5)
    return shapes(
        mask.nonzero(),
        x[mask.bool()],
        torch.masked_select(x[..., 0], mask.bool()),
        torch.tensor([4, 4, 7]).unique(),
        torch.tensor([4, 4, 7]).bincount(),
        torch.arange(2).repeat_interleave(torch.tensor([3, 1])),
    )


def test_known_values_give_the_true_size() -> None:
    made = under_rules(of_known)
    assert made.result == [[3, 2], [3, 5], [3], [2], [8], [4]]
    assert made.guesses == []


def of_a_ctc_loss() -> list[list[int]]:
    scores = torch.randn(50, 4, 32).log_softmax(-1)
    targets, lengths = torch.ones(4, 12, dtype=torch.long), torch.tensor([3, 9, 5, 4])
    loss, kept = aten._ctc_loss(scores, targets, torch.full((4,), 50), lengths)
    return shapes(loss, kept)


def test_the_longest_target_decides_what_a_ctc_loss_keeps() -> None:
    assert under_rules(of_a_ctc_loss).result == [[4], [4, 50, 2 * 9 + 1]]


def of_unknown() -> list[list[int]]:
    x = torch.randn(2, 3, 5)
    mask = x[..., 0] > 0
    return shapes(mask.nonzero(), x[x[..., 1] > 0], torch.masked_select(x, x > 0))


def test_a_comparison_of_floats_gives_the_largest_and_is_a_guess() -> None:
    made = under_rules(of_unknown)
    assert made.result == [[6, 2], [6, 5], [30]]
    assert set(made.guesses) == {"every element taken as true"}


def of_a_declared_share() -> list[list[int]]:
    declare(true_share=0.25)
    return of_unknown()


def test_a_declared_share_is_taken_and_listed() -> None:
    made = under_rules(of_a_declared_share)
    assert made.result == [[2, 2], [2, 5], [8]]
    assert set(made.guesses) == {"25 % of the elements taken as true, as declared"}


def of_unknown_to_be_told_apart() -> list[list[int]]:
    codes = (torch.randn(7) * 10).long()
    return shapes(codes.unique(), torch.randn(4).unique(), torch.randn(5).nonzero())


def test_unknown_values_are_all_different_and_a_guess() -> None:
    made = under_rules(of_unknown_to_be_told_apart)
    assert made.result == [[7], [4], [5, 1]]
    assert set(made.guesses) == {"every element taken as different", "every element taken as true"}


def of_size_then_value() -> Any:
    x = torch.randn(4)
    torch.masked_select(x, x > 0)
    return x.sum().item()


def test_a_size_that_was_assumed_gives_floats_no_value() -> None:
    made = under_rules(of_size_then_value)
    assert made.result == 1.0  # the guess for any scalar, not the sum of four ones
    assert "the value of a float32 taken as 1.0" in made.guesses


def of_writing() -> tuple[list[int], list[int]]:
    x = torch.zeros(4, 3)
    x[torch.tensor([True, False, True, False])] = 1.0
    return list(x.shape), list(x[torch.tensor([0, 2])].shape)


def test_writing_under_a_mask_keeps_the_shape() -> None:
    made = under_rules(of_writing)
    assert made.result == ([4, 3], [2, 3])


@pytest.mark.parametrize(
    ("func", "args", "depends"),
    [
        (aten.nonzero.default, (), True),
        (aten.index.Tensor, (None, [torch.ones(2, dtype=torch.bool)]), True),
        (aten.index.Tensor, (None, [None, torch.ones(2, dtype=torch.long)]), False),
        (aten.mm.default, (), False),
    ],
)
def test_only_masks_and_counts_size_a_result(func: Any, args: Any, depends: bool) -> None:
    assert depends_on_values(func, args) is depends
