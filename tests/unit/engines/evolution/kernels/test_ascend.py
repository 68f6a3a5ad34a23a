"""The kernel moves a matrix as the whole operators do, and says by how much."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.evolution.update import direction
from flatout.multiplex.factors import Factors
from tests.kernels import INTERPRETED, Numbers, needs_device

pytestmark = needs_device


@pytest.mark.parametrize(("variants", "rank"), [(3, 1), (70, 1), (40, 4)])
@pytest.mark.parametrize(("out_width", "in_width"), [(16, 8), (130, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_the_sum_of_its_members(
    variants: int, rank: int, out_width: int, in_width: int, dtype: torch.dtype
) -> None:
    from flatout.engines.evolution.kernels.ascend import ascend

    numbers = Numbers()
    expand, shrink = numbers.factor(variants, rank, out_width), numbers.factor(variants, rank, in_width)
    coefficients = numbers.normal(variants)
    weight = numbers.normal(out_width, in_width, dtype=dtype)
    master = weight.float()  # of a float32 weight: the weight itself

    def drawn(block: range) -> Factors:
        return Factors(shrink[block.start : block.stop], expand[block.start : block.stop], 0.01)

    wanted = direction(drawn, coefficients)
    before = master.clone()
    largest = coefficients.abs().max().item()
    squares = ascend(
        master,
        weight,
        expand=expand,
        shrink=shrink,
        gains=coefficients / largest,
        unit=largest * 0.01,
        lr=0.5,
    )
    scale = wanted.abs().max()
    assert (master - before - 0.5 * wanted).abs().max() < 2e-3 * scale
    # Triton's interpreter cuts bfloat16 where a GPU rounds.
    off = (weight.float() - master.to(dtype).float()).abs() / master.abs().clamp(min=1e-6)
    assert off.max() <= (2**-7 if INTERPRETED else 0)
    torch.testing.assert_close(squares[0], wanted.square().sum(), rtol=2e-3, atol=0)
    torch.testing.assert_close(squares[1], master.square().sum(), rtol=1e-5, atol=0)
