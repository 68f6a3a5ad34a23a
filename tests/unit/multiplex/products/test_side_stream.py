"""Branches without a GPU: there are none, and the work is done where it stands (tests/gpu has the others)."""

from __future__ import annotations

import torch

from flatout.multiplex.products.side_stream import BRANCH_TOKENS, branch_for


def test_a_cpu_works_in_order() -> None:
    x = torch.zeros(BRANCH_TOKENS, 1)
    branch = branch_for(x)
    with branch.beside():
        x += 1
    x *= 2
    branch.join()
    assert x.eq(2).all()
    assert branch_for(x[:1]) is branch
