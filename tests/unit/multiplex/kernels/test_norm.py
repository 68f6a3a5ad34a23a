from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, Numbers, needs_device, unit_of

pytestmark = needs_device

WIDTH, EPS = 70, 1e-5
ROWS = Rows((1, 1, None, None, 0, 0), (1, -1, 1, 1, -1, -1))


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize(
    ("rank", "shared", "dtype"),
    [
        (0, 1, torch.int8),
        (1, 1, torch.int8),
        (1, 2, torch.int8),
        (3, 2, torch.int8),
        (4, 1, torch.float32),
        (4, 2, torch.int8),
        (8, 2, torch.int8),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(
    ("steered", "convert", "parts"), [(False, False, 3), (True, False, 3), (False, True, 35)]
)
def test_a_branch_is_added_with_its_correction_and_normalised(
    rank: int, shared: int, dtype: torch.dtype, num_tokens: int, steered: bool, convert: bool, parts: int
) -> None:
    """`shared` rows of a program run one variant, each with its own sign."""
    from flatout.multiplex.kernels.norm import add_norm

    numbers = Numbers(rank)
    rows, tables = len(ROWS) * num_tokens, ROWS.tables(DEVICE)
    residual, branch, weight = numbers.normal(rows, WIDTH), numbers.normal(rows, WIDTH), numbers.normal(WIDTH)
    ranks = max(rank, 1)
    expand, shrink = (numbers.factor(2, ranks, WIDTH, dtype=dtype) for _ in range(2))
    coefficients = numbers.normal(rows, ranks, parts) * unit_of(dtype)
    scale = 0.3 * unit_of(dtype)
    index, sign = (table.repeat_interleave(num_tokens) for table in (tables.index, tables.sign))
    wanted = residual + branch
    if rank:
        wanted = wanted + torch.einsum("nr,nrw->nw", coefficients.sum(-1), expand[index].float())
    vectors = numbers.normal(2, WIDTH)
    if steered:
        wanted = wanted + vectors[index] * sign[:, None]
    wanted_normed = normalised(wanted, weight)
    wanted_shrunk = torch.einsum("nw,nrw->nr", wanted_normed, shrink[index].float()) * sign[:, None] * scale
    normed, shrunk = torch.empty_like(residual), torch.zeros(rows, ranks, device=DEVICE)
    add_norm[(rows // shared,)](
        residual, branch, branch, branch, 1.0, weight, normed, coefficients, expand, shrink, shrunk,
        vectors, tables.index, tables.sign, scale, EPS, num_tokens,
        WIDTH=WIDTH, BLOCK=128, RANK_IN=rank, RANK_OUT=rank, PARTS=parts, BLOCK_PARTS=64 if parts > 4 else 4,
        FROM_BRANCH=True, SCALED=False, STEERED=steered, ROWS=shared, CONVERT=convert,
        AHEAD=convert, num_warps=4,
    )  # fmt: skip
    torch.testing.assert_close(residual, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, wanted_normed, rtol=1e-4, atol=1e-4)
    if rank:
        torch.testing.assert_close(shrunk, wanted_shrunk, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 6.5])
def test_the_first_norm_reads_the_embedding(scale: float | None) -> None:
    from flatout.multiplex.kernels.norm import add_norm

    numbers, tables = Numbers(), Rows.plain(4).tables(DEVICE)
    embedding, weight = numbers.normal(9, WIDTH), numbers.normal(WIDTH)
    tokens = torch.tensor([8, 0, 3, 3], device=DEVICE)
    residual, normed = (torch.empty(4, WIDTH, device=DEVICE) for _ in range(2))
    unread = torch.empty(1, device=DEVICE)
    add_norm[(4,)](
        residual, unread, tokens, embedding, 1.0 if scale is None else scale, weight, normed, unread, unread,
        unread, unread, unread, tables.index, tables.sign, 0.0, EPS, 1,
        WIDTH=WIDTH, BLOCK=128, RANK_IN=0, RANK_OUT=0, PARTS=1, BLOCK_PARTS=1,
        FROM_BRANCH=False, SCALED=scale is not None, STEERED=False, ROWS=1, CONVERT=False,
        AHEAD=False, num_warps=4,
    )  # fmt: skip
    wanted = embedding[tokens] * (1.0 if scale is None else scale)
    torch.testing.assert_close(residual, wanted)
    torch.testing.assert_close(normed, normalised(wanted, weight), rtol=1e-4, atol=1e-4)
