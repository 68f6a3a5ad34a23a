from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.gather import Layout, Source, expand, gather_rows


@given(parts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6))
def test_parts_become_runs_of_rows(parts: list[tuple[int, int]]) -> None:
    place, table = 0, []
    for row, length in parts:
        table.append((row - place, length))
        place += length
    index = expand(torch.tensor(table).t(), num_rows=place, last_row=18)
    assert index.tolist() == [min(row + i, 18) for row, length in parts for i in range(length)]


def layout() -> Layout:
    """Two sequences of length 3: a shared row first, then the sample's own rows, one or two of them."""
    return Layout(
        sources=[Source(first_row=0, num_rows=1, pieces=[0]), Source(first_row=1, num_rows=4, pieces=[])],
        starts=torch.tensor([[0, 0], [1, 1]]),
        lengths=torch.tensor([2, 3]),
        length=3,
    )


INDEX = torch.tensor([0, 1, 5, 0, 3, 4])


def test_rows_and_padding() -> None:
    sources = [torch.tensor([10.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    found = gather_rows(sources, INDEX, pad_value=-1, layout=layout())
    assert found.tolist() == [10, 1, -1, 10, 3, 4]


def test_the_gradient_adds_shared_rows_and_copies_the_others() -> None:
    shared = torch.tensor([[10.0, 0.0]], requires_grad=True)
    own = torch.randn(4, 2, requires_grad=True)
    found = gather_rows([shared, own], INDEX, pad_value=0, layout=layout())
    weights = torch.arange(1.0, 13.0).view(6, 2)
    (found * weights).sum().backward()
    assert shared.grad is not None and own.grad is not None
    assert shared.grad.tolist() == [(weights[0] + weights[3]).tolist()]
    assert own.grad.tolist() == [weights[1].tolist(), [0, 0], weights[4].tolist(), weights[5].tolist()]


def test_only_wanted_gradients_are_made() -> None:
    shared, own = torch.ones(1, 2, requires_grad=True), torch.ones(4, 2)
    gather_rows([shared, own], INDEX, pad_value=0, layout=layout()).sum().backward()
    assert shared.grad is not None and own.grad is None
    with torch.no_grad():
        assert not gather_rows([shared, own], INDEX, pad_value=0, layout=layout()).requires_grad
