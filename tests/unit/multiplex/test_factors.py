from __future__ import annotations

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors


def test_a_delta_is_the_sum_of_outer_products() -> None:
    factors = Factors(torch.randn(4, 3, 5), torch.randn(4, 3, 7), 0.5)
    assert (factors.num_variants, factors.rank) == (4, 3)
    expected = sum(torch.outer(factors.expand[2, j], factors.shrink[2, j]) for j in range(3))
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(factors.delta(2), 0.5 * expected)
    assert torch.equal(factors.delta(2, sign=-1), -factors.delta(2))


def test_integers_give_a_float_delta() -> None:
    shrink = torch.tensor([[[127, -127]]], dtype=torch.int8)
    factors = Factors(shrink, shrink.clone(), 1.0)
    assert factors.delta(0).tolist() == [[16129.0, -16129.0], [-16129.0, 16129.0]]


@pytest.mark.parametrize(
    ("shrink", "expand"), [((4, 3, 5), (4, 2, 7)), ((4, 3, 5), (3, 3, 7)), ((4, 5), (4, 5))]
)
def test_factors_that_do_not_match_are_refused(shrink: tuple[int, ...], expand: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"do not match \(both are \[variants, rank, width\]\)"):
        Factors(torch.zeros(shrink), torch.zeros(expand), 1.0)
