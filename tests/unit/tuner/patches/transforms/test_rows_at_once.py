"""Rows by one index are the rows one by one; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.rows_at_once import PATCH
from tests.unit.tuner.patches.test_patch import LOOP, compiled, rewrite

VARIANTS = {
    "loop": LOOP,
    "comprehension": """
import torch
def last(x, lengths):
    return torch.stack([x[i][n - 1] for i, n in enumerate(lengths)])
""",
    "method, temporaries": """
import torch
class Head:
    def pool(self, x, lengths):
        found = []
        for b in range(len(lengths)):
            end = lengths[b] - 1
            found.append(x[b, end])
        pooled = torch.stack(found, dim=0)
        return pooled
def last(x, lengths):
    return Head().pool(x, lengths)
""",
    "one sample": """
import torch
def last(x, lengths):
    return torch.stack([x[0, k - 1] for k in lengths])
""",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_and_gradients_are_the_same(name: str) -> None:
    text = VARIANTS[name]
    found = []
    for module in (compiled(text), compiled(rewrite(PATCH, text))):
        x = torch.arange(24.0).view(3, 4, 2).requires_grad_()
        rows = module.last(x, [4, 1, 2])
        (rows * torch.arange(rows.numel()).view_as(rows)).sum().backward()
        found.append((rows, x.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("torch.stack(rows)", "torch.stack(rows), rows", "rows is read again"),
        ("torch.stack", "torch.cat", "torch.cat"),
        ("x[i, n - 1]", "x[i, n - 1] * 2", "is not a row"),
        ("x[i, n - 1]", "x[i, f(n)]", "is unknown"),
        ("        rows.append", "        print(i)\n        rows.append", "does more than fill"),
        ("x[i, n - 1]", "n[i, 0]", "changes from row to row"),
        ("x[i, n - 1]", "x[0, 1]", "every row is the same"),
    ],
)
def test_what_cannot_be_seen_is_refused(old: str, new: str, words: str) -> None:
    assert old in LOOP
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(SourceFile(LOOP.replace(old, new)), ())
