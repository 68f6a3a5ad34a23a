from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flatout.measure.patches import Patches
from flatout.tuner.trial import meter


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def test_sums_tell_gradients_apart_that_a_plain_sum_takes_for_equal() -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert meter._sums(one) == meter._sums(one.clone())
    assert meter._sums(one) != meter._sums(one.flip(0))
    assert meter._sums(one) != meter._sums(one.view(4))
    nudged = one.clone()
    nudged[0, 0] = torch.nextafter(nudged[0, 0], torch.tensor(2.0))
    assert meter._sums(one) != meter._sums(nudged)
    places = torch.tensor([[0, 0]])
    sparse = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert meter._sums(sparse)[0] == (3.0).hex()


def test_dropout_is_off_where_gradients_are_compared(patches: Patches) -> None:
    meter._switch_dropout_off(torch, patches)
    x = torch.ones(64)
    assert torch.equal(nn.Dropout(0.5)(x), x)
    q = torch.randn(1, 1, 4, 8)
    plain = nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.9), plain)


def test_seeds_are_shifted_by_as_much_as_is_asked_for(patches: Patches) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    meter._shift_seeds(torch, patches, 2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), expected)


def test_inputs_are_widened_and_whole_numbers_are_not() -> None:
    args, kwargs = meter._widen(((torch.ones(1), torch.ones(1, dtype=torch.int64)), {"x": [torch.ones(1)]}))
    assert [each.dtype for each in args] == [torch.float64, torch.int64]
    assert kwargs["x"][0].dtype == torch.float64
