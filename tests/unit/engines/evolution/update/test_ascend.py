"""The kernel moves matrices as the whole operators do, and says by how much."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.evolution.population.weights import Stack
from flatout.engines.evolution.update.directions import Coefficients, direction
from tests.support.kernels import DEVICE, INTERPRETED, Numbers, needs_device

pytestmark = needs_device


@pytest.mark.parametrize(("variants", "rank"), [(3, 1), (70, 1), (40, 4)])
@pytest.mark.parametrize(("out_width", "in_width"), [(16, 8), (130, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_the_sum_of_its_members(
    variants: int, rank: int, out_width: int, in_width: int, dtype: torch.dtype
) -> None:
    from flatout.engines.evolution.update.ascend import address_table, ascend

    numbers = Numbers()
    stack = Stack(
        numbers.factor(2, variants, rank, in_width),
        numbers.factor(2, variants, rank, out_width),
        (0.01, 0.01),
    )
    coefficients = numbers.normal(variants)
    weights = [numbers.normal(out_width, in_width, dtype=dtype) for _ in range(2)]
    masters = [weight.float() for weight in weights]  # of a float32 weight: the weight itself
    wanted = direction(stack.part, coefficients)
    before = torch.stack(masters)
    addresses = address_table(masters, weights)
    assert addresses is not None
    found = Coefficients.of(coefficients, device=coefficients.device)
    squares = ascend(addresses, stack, gains=found.gains, unit=found.largest * 0.01, lr=0.5, like=weights[0])
    after = torch.stack(masters)
    scale = wanted.abs().max()
    assert (after - before - 0.5 * wanted).abs().max() < 2e-3 * scale
    # Triton's interpreter cuts bfloat16 where a GPU rounds.
    off = (torch.stack(weights).float() - after.to(dtype).float()).abs() / after.abs().clamp(min=1e-6)
    assert off.max() <= (2**-7 if INTERPRETED else 0)
    expected = torch.stack([wanted.square().sum(), 0.25 * wanted.square().sum(), after.square().sum()])
    torch.testing.assert_close(squares, expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(squares[2], expected[2], rtol=1e-5, atol=0)


def test_tensors_with_gaps_or_inside_a_line_have_no_table() -> None:
    from flatout.engines.evolution.update.ascend import address_table

    whole = torch.zeros(8, 8, device=DEVICE)
    table = address_table([whole], [whole])
    assert table is not None and table.tolist() == [[whole.data_ptr()] * 2]
    assert address_table([whole[:, :4]], [whole]) is None
    assert address_table([whole], [whole.flatten()[1:]]) is None
