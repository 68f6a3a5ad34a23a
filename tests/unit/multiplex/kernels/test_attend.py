from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, Numbers, needs_device, unit_of

pytestmark = needs_device

HEADS, SHARED, WIDTH, LENGTH, SCALE, EPS = 6, 2, 32, 64, 0.2, 1e-5
TOTAL = (HEADS + 2 * SHARED) * WIDTH
ROWS = Rows((1, None, 0), (1, 1, -1))
POSITIONS = (0, 19, 40)


@dataclass
class Case:
    """Everything that one step of attention reads."""

    rank: int
    dtype: torch.dtype
    normed: bool = False
    biased: bool = False
    window: int | None = None
    convert: bool = False

    def __post_init__(self) -> None:
        numbers, ranks = Numbers(self.rank), max(self.rank, 1)
        self.qkv, self.bias = numbers.normal(len(ROWS), TOTAL), numbers.normal(TOTAL)
        self.cos, self.sin = (numbers.normal(LENGTH, WIDTH // 2) for _ in range(2))
        self.q_weight, self.k_weight = (numbers.normal(WIDTH) for _ in range(2))
        self.keys, self.values = (numbers.normal(len(ROWS), SHARED, LENGTH, WIDTH) for _ in range(2))
        self.coefficients = numbers.normal(len(ROWS), ranks) * unit_of(self.dtype)
        self.expand = numbers.factor(2, ranks, TOTAL, dtype=self.dtype)
        self.shrink = numbers.factor(2, ranks, HEADS * WIDTH, dtype=self.dtype)
        self.scale = 0.3 * unit_of(self.dtype)
        self.tables = ROWS.tables(DEVICE)

    def rotated(self, x: Tensor, position: int) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[position], self.sin[position]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def heads(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, key and value of a row, [heads, width]."""
        x = self.qkv[row] + (self.bias if self.biased else 0)
        if self.rank:
            x = x + self.coefficients[row] @ self.expand[self.tables.index[row]].float()
        q, k, v = x.view(-1, WIDTH).split((HEADS, SHARED, SHARED))
        if self.normed:
            q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS) * self.q_weight
            k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + EPS) * self.k_weight
        return self.rotated(q, POSITIONS[row]), self.rotated(k, POSITIONS[row]), v

    def wanted(self, row: int) -> Tensor:
        """softmax(q k^T) v of a row, its own key included, [heads * width]."""
        q, k, v = self.heads(row)
        here = POSITIONS[row]
        first = 0 if self.window is None else max(0, here - self.window + 1)
        keys, values = (
            torch.cat((cached[row, :, first:here], own[:, None]), 1).repeat_interleave(HEADS // SHARED, 0)
            for cached, own in ((self.keys, k), (self.values, v))
        )
        shares = ((keys @ q[:, :, None])[..., 0] * SCALE).softmax(-1)
        return (shares[:, None] @ values).flatten()

    def run(self) -> tuple[Tensor, Tensor]:
        """The kernel's output [rows, heads * width], and the coefficients of the product after it."""
        from flatout.multiplex.kernels.attend import attend

        out = torch.empty(len(ROWS), HEADS * WIDTH, device=DEVICE)
        shrunk = torch.zeros(len(ROWS), max(self.rank, 1), SHARED, device=DEVICE)
        attend[(len(ROWS) * SHARED,) if self.convert else (len(ROWS), SHARED)](
            self.qkv, self.bias, self.cos, self.sin, self.q_weight, self.k_weight, self.keys, self.values,
            out, torch.tensor(POSITIONS, device=DEVICE), self.coefficients, self.expand, self.shrink, shrunk,
            self.tables.index, self.tables.sign, self.scale, SCALE, EPS, LENGTH, self.window or 0,
            H=HEADS, K=SHARED, E=WIDTH, GROUP=4, COPIES=4, RANK=self.rank, TILE=16, STAGES=1,
            BIASED=self.biased, NORMED=self.normed, WINDOWED=self.window is not None, PRECISION="ieee",
            CONVERT=self.convert, ALONG=self.convert, num_warps=1,
        )  # fmt: skip
        return out, shrunk.sum(-1)


@pytest.mark.parametrize(
    ("rank", "dtype", "options"),
    [
        (0, torch.int8, {}),
        (1, torch.int8, {"biased": True}),
        (3, torch.float32, {"normed": True}),
        (4, torch.int8, {"biased": True, "normed": True}),
        (4, torch.int8, {"convert": True}),
        (1, torch.int8, {"window": 7}),
        (0, torch.int8, {"window": 100}),
    ],
)
def test_a_step_attends_and_carries_both_corrections(
    rank: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    case = Case(rank, dtype, **options)
    wanted = torch.stack([case.wanted(row) for row in range(len(ROWS))])
    fresh = [case.heads(row)[1:] for row in range(len(ROWS))]
    before = case.keys.clone(), case.values.clone()
    out, shrunk = case.run()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    for row, here in enumerate(POSITIONS):  # its own key and value are written, and nothing else
        for was, cached, own in zip(before, (case.keys, case.values), fresh[row], strict=True):
            torch.testing.assert_close(cached[row, :, here], own, rtol=1e-4, atol=1e-4)
            was[row, :, here] = cached[row, :, here]
    assert torch.equal(before[0], case.keys) and torch.equal(before[1], case.values)
    if case.rank:
        factors = case.shrink[case.tables.index].float()
        gains = case.tables.sign[:, None] * case.scale
        torch.testing.assert_close(
            shrunk, torch.einsum("nw,nrw->nr", wanted, factors) * gains, rtol=1e-4, atol=1e-4
        )
