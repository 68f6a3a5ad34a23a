from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, Numbers, needs_device, unit_of

pytestmark = needs_device

HEADS, SHARED, WIDTH, LENGTH, TOKENS, EPS = 4, 2, 32, 9, 3, 1e-5
TOTAL = (HEADS + 2 * SHARED) * WIDTH
ROWS, SLOTS = Rows((1, None), (-1, 1)), (2, 0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, tokens, heads, width]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:TOKENS, None], sin[:TOKENS, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize(
    ("rank", "biased", "normed"), [(0, False, False), (1, True, False), (3, False, True), (4, True, True)]
)
def test_a_prompt_is_split_into_heads_and_into_the_cache(rank: int, biased: bool, normed: bool) -> None:
    from flatout.multiplex.kernels.split import split_heads

    numbers, ranks, tables = Numbers(rank), max(rank, 1), ROWS.tables(DEVICE)
    n = len(ROWS)
    qkv, bias = numbers.normal(n * TOKENS, TOTAL), numbers.normal(TOTAL)
    cos, sin = (numbers.normal(LENGTH, WIDTH // 2) for _ in range(2))
    q_weight, k_weight = (numbers.normal(WIDTH) for _ in range(2))
    coefficients = numbers.normal(n * TOKENS, ranks) / 32
    expand = numbers.factor(2, ranks, TOTAL)
    x = qkv + bias if biased else qkv
    if rank:
        index = tables.index.repeat_interleave(TOKENS)
        x = x + torch.einsum("nr,nrw->nw", coefficients, expand[index].float())
    q, k, v = x.view(n, TOKENS, -1, WIDTH).split((HEADS, SHARED, SHARED), dim=2)
    if normed:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS) * q_weight
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + EPS) * k_weight
    wanted = [part.transpose(1, 2) for part in (rotated(q, cos, sin), rotated(k, cos, sin), v)]
    queries = torch.empty(n, HEADS, TOKENS, WIDTH, device=DEVICE)
    fresh = [torch.empty(n, SHARED, TOKENS, WIDTH, device=DEVICE) for _ in range(2)]
    cache = [torch.full((3, SHARED, LENGTH, WIDTH), 7.0, device=DEVICE) for _ in range(2)]
    split_heads[(n * TOKENS, HEADS + 2 * SHARED)](
        qkv, bias, cos, sin, q_weight, k_weight, queries, *fresh, *cache, torch.tensor(SLOTS, device=DEVICE),
        coefficients, expand, tables.index, EPS, TOKENS, LENGTH,
        H=HEADS, K=SHARED, E=WIDTH, RANK=rank, BIASED=biased, NORMED=normed, num_warps=1,
    )  # fmt: skip
    for found, part in zip((queries, *fresh), wanted, strict=True):
        torch.testing.assert_close(found, part, rtol=1e-4, atol=1e-4)
    for held, part in zip(cache, fresh, strict=True):
        assert torch.equal(held[list(SLOTS), :, :TOKENS], part)
        assert held[1].eq(7).all() and held[:, :, TOKENS:].eq(7).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_rows_are_shrunk_with_their_own_factors(dtype: torch.dtype) -> None:
    from flatout.multiplex.kernels.split import shrink_rows

    numbers, rank, width, tables = Numbers(), 3, 50, ROWS.tables(DEVICE)
    rows = len(ROWS) * TOKENS
    x, shrink = numbers.normal(rows, width), numbers.factor(2, rank, width, dtype=dtype)
    scale = 0.3 * unit_of(dtype)
    shrunk = torch.empty(rows, rank, device=DEVICE)
    shrink_rows[(rows,)](
        x, shrink, shrunk, tables.index, tables.sign, scale, TOKENS,
        WIDTH=width, BLOCK=64, RANK=rank, num_warps=1,
    )  # fmt: skip
    index, sign = (table.repeat_interleave(TOKENS) for table in (tables.index, tables.sign))
    wanted = torch.einsum("nw,nrw->nr", x, shrink[index].float()) * sign[:, None] * scale
    torch.testing.assert_close(shrunk, wanted, rtol=1e-4, atol=1e-4)
