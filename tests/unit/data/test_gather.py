from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.gather import gather_rows

INDEX = torch.tensor([0, 1, 5, 5, 3, 4])  # the padding twice, row 2 not at all


def test_rows_and_padding() -> None:
    sources = [torch.tensor([10.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    assert gather_rows(sources, INDEX, pad_value=-1).tolist() == [10, 1, -1, -1, 3, 4]


def test_the_gradient_is_the_rows_copied_back() -> None:
    one, four = torch.randn(1, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    weights = torch.arange(1.0, 13.0).view(6, 2)
    (gather_rows([one, four], INDEX, pad_value=0) * weights).sum().backward()
    assert one.grad is not None and four.grad is not None
    assert one.grad.tolist() == weights[:1].tolist()
    assert four.grad.tolist() == [weights[1].tolist(), [0, 0], weights[4].tolist(), weights[5].tolist()]


def test_only_wanted_gradients_are_made() -> None:
    one, four = torch.ones(1, 2, requires_grad=True), torch.ones(4, 2)
    gather_rows([one, four], INDEX, pad_value=0).sum().backward()
    assert one.grad is not None and four.grad is None
    with torch.no_grad():
        assert not gather_rows([one, four], INDEX, pad_value=0).requires_grad


@given(shared_first=st.booleans(), seed=st.integers(0, 99))
def test_expanded_rows_sum_their_gradient(shared_first: bool, seed: int) -> None:
    torch.manual_seed(seed)
    shared = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    own = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    sources = [shared.expand(3, 2), own] if shared_first else [own, shared.expand(3, 2)]
    index = torch.randperm(7)
    expected = torch.cat([*sources, torch.full((1, 2), 5.0, dtype=torch.float64)])[index]
    found = gather_rows(sources, index, pad_value=5)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), [shared, own])
    theirs = torch.autograd.grad((expected * weights).sum(), [shared, own])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
