from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, needs_device

pytestmark = needs_device

ROWS = Rows((2, None, 0, 0, 1), (1, 1, -1, 1, -1))


def factor(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(*shape, generator=generator)
    return ((values * 32).round().clamp(-127, 127) if dtype == torch.int8 else values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor_dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rank", "middle", "widths"), [(1, (), (70, 33)), (3, (2,), (5, 2100)), (16, (), (600, 9))]
)
def test_the_kernels_add_each_rows_correction(
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
    rank: int,
    middle: tuple[int, ...],
    widths: tuple[int, int],
) -> None:
    from flatout.multiplex.kernels.linear import correct

    generator = torch.Generator().manual_seed(rank)
    in_width, out_width = widths
    x = torch.randn(len(ROWS), *middle, in_width, generator=generator).to(dtype)
    y = torch.randn(len(ROWS), *middle, out_width, generator=generator).to(dtype)
    shrink = factor(generator, 3, rank, in_width, dtype=factor_dtype)
    # A slice of a wider factor, as the parts of a stacked projection are.
    expand = factor(generator, 3, rank, out_width + 4, dtype=factor_dtype)[:, :, 1 : out_width + 1]
    tables = ROWS.tables()
    gain = tables.sign * (1e-3 if factor_dtype == torch.int8 else 0.3)
    expected = y.double()
    for row in range(len(ROWS)):
        variant = int(tables.index[row])
        delta = expand[variant].double().T @ shrink[variant].double()
        expected[row] += gain[row].double() * x[row].double() @ delta.T
    result = y.clone().to(DEVICE)
    correct(
        result,
        x.to(DEVICE),
        shrink=shrink.to(DEVICE),
        expand=expand.to(DEVICE),
        index=tables.index.to(DEVICE),
        gain=gain.to(DEVICE),
    )
    assert torch.equal(result[1].cpu(), y[1])
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(result.cpu(), expected.to(dtype), **tolerance)


def test_a_broken_variant_does_not_reach_an_unperturbed_row() -> None:
    from flatout.multiplex.kernels.linear import correct

    tables = Rows((None, 0)).tables(DEVICE)
    y = torch.ones(2, 8, device=DEVICE)
    nan = torch.full((1, 1, 8), torch.nan, device=DEVICE)
    correct(y, y.clone(), shrink=nan, expand=nan, index=tables.index, gain=tables.sign)
    assert y[0].eq(1).all() and y[1].isnan().all()
