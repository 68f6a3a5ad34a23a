"""Which thin products are chosen, and sums in wider numbers; test_trained checks what they give."""

from __future__ import annotations

import pytest
import torch

from flatout.multiplex.products.ranges import (
    add_products,
    adds_into_wider,
    choose_path,
    products_of,
)
from flatout.multiplex.rows import VariantRange
from tests.support.multiplex import ranges_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_into_wider_numbers(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 4, 6).to(dtype), torch.randn(2, 6, 5).to(dtype)
    many, one = torch.ones(2, 4, 5), torch.ones(4, 5)
    add_products(many, a, b, alpha=2.0)
    add_products(one, a[0], b[0], alpha=2.0)
    expected = 1 + 2 * torch.bmm(a.float(), b.float())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(many, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one, expected[0], rtol=tolerance, atol=tolerance)


def test_the_choice_of_products_says_why() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    equal, unequal = ranges_of([4, 4]), ranges_of([4, 5])

    def chosen(
        ranges: tuple[VariantRange, ...], device: torch.device, rank: int, grouped: bool = True
    ) -> str:
        decision = choose_path(ranges, device=device, dtype=torch.bfloat16, rank=rank, grouped_mm=grouped)
        assert decision.reason
        return decision.value

    assert chosen(equal, cpu, 32) == "loop"
    assert chosen(equal, gpu, 32) == chosen(equal, gpu, 256) == "batched"
    assert chosen(unequal, gpu, 32) == "dense"
    assert chosen(unequal, gpu, 256) == "grouped"
    assert chosen(unequal, gpu, 256, grouped=False) == "dense"
    assert chosen((equal[1],), gpu, 512) == "batched"
    backwards = (VariantRange(variant=1, start=0, stop=4), VariantRange(variant=0, start=4, stop=9))
    assert chosen(backwards, gpu, 256) == "dense"


def test_in_place_is_taken_only_where_torch_can() -> None:
    assert not adds_into_wider(torch.device("cpu"), torch.bfloat16)


def test_coefficients_of_foreign_variants_are_zero_in_dense_products() -> None:
    products = products_of(
        "dense",
        ranges_of([2, 1]),
        ranks=(2, 2),
        scales=(2.0, 3.0),
        rank=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    coefficients = products.down(products.split(torch.ones(3, 4)), products.factor(torch.ones(2, 2, 4)))
    assert coefficients.tolist() == [[8, 8, 0, 0], [8, 8, 0, 0], [0, 0, 12, 12]]
