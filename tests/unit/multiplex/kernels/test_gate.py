from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, INTERPRETED, Numbers, needs_device, unit_of

pytestmark = needs_device

WIDTH, BLOCK, PARTS = 40, 16, 3
ROWS = Rows((1, 1, None, None, 0, 0), (1, -1, 1, 1, -1, -1))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rank", "shared", "dtype"),
    [(0, 1, torch.int8), (1, 2, torch.int8), (3, 1, torch.float32), (4, 2, torch.int8), (8, 1, torch.int8)],
)
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(("convert", "along", "ahead"), [(False, False, False), (True, True, True)])
def test_gate_and_up_are_corrected_joined_and_shrunk(
    kind: str,
    rank: int,
    shared: int,
    dtype: torch.dtype,
    num_tokens: int,
    convert: bool,
    along: bool,
    ahead: bool,
) -> None:
    from flatout.multiplex.kernels.gate import gate_up

    numbers, ranks = Numbers(rank), max(rank, 1)
    rows, tables = len(ROWS) * num_tokens, ROWS.tables(DEVICE)
    joined, coefficients = numbers.normal(rows, 2 * WIDTH), numbers.normal(rows, ranks) * unit_of(dtype)
    expand, shrink = (
        numbers.factor(2, ranks, 2 * WIDTH, dtype=dtype),
        numbers.factor(2, ranks, WIDTH, dtype=dtype),
    )
    scale = 0.3 * unit_of(dtype)
    index, sign = (table.repeat_interleave(num_tokens) for table in (tables.index, tables.sign))
    whole = joined
    if rank:
        whole = joined + torch.einsum("nr,nrw->nw", coefficients, expand[index].float())
    gate, up = whole.chunk(2, -1)
    wanted = (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up
    wanted_shrunk = torch.einsum("nw,nrw->nr", wanted, shrink[index].float()) * sign[:, None] * scale
    out, shrunk = torch.empty(rows, WIDTH, device=DEVICE), torch.zeros(rows, ranks, PARTS, device=DEVICE)
    gate_up[(rows // shared * PARTS,) if along else (rows // shared, PARTS)](
        joined, out, coefficients, expand, shrink, shrunk, tables.index, tables.sign, scale, num_tokens,
        WIDTH=WIDTH, BLOCK=BLOCK, PARTS=PARTS, RANK=rank, ROWS=shared, KIND=kind, DOT=0,
        CONVERT=convert, ALONG=along, AHEAD=ahead and rank in (4, 8), num_warps=1,
    )  # fmt: skip
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    if rank:
        torch.testing.assert_close(shrunk.sum(-1), wanted_shrunk, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_matrix_product_gives_the_coefficients_of_rounded_rows(rank: int, kind: torch.dtype) -> None:
    """int8 and what was rounded are exact in it, so it is held to a product in float32."""
    if INTERPRETED and kind == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    from flatout.multiplex.kernels.gate import gate_up

    numbers, tables = Numbers(rank), ROWS.tables(DEVICE)
    joined = numbers.normal(len(ROWS), 2 * WIDTH, dtype=kind)
    coefficients = numbers.normal(len(ROWS), rank) / 32
    expand, shrink = numbers.factor(2, rank, 2 * WIDTH), numbers.factor(2, rank, WIDTH)
    outs, sums = [], []
    for dot in (0, 16):
        outs.append(torch.empty(len(ROWS), WIDTH, device=DEVICE, dtype=kind))
        sums.append(torch.full((len(ROWS), rank, PARTS), torch.nan, device=DEVICE))
        gate_up[(len(ROWS) // 2, PARTS)](
            joined, outs[-1], coefficients, expand, shrink, sums[-1], tables.index, tables.sign, 0.01, 1,
            WIDTH=WIDTH, BLOCK=BLOCK, PARTS=PARTS, RANK=rank, ROWS=2, KIND="silu", DOT=dot, CONVERT=False,
            ALONG=False, AHEAD=False, num_warps=1,
        )  # fmt: skip
    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)
    wanted = torch.einsum("nw,nrw->nr", outs[1].float(), shrink[tables.index].float())
    torch.testing.assert_close(sums[1].sum(-1), wanted * tables.sign[:, None] * 0.01, rtol=1e-4, atol=1e-4)
