"""Rows cut apart before a loop are the rows that it reads; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.unbound_rows import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

LOOP = """
import torch
def run(x, h):
    # the state after each row
    for t in range(x.size(1)):
        h = torch.tanh(h + x[:, t, :])
    return h
"""
NESTED = """
import torch
class Model:
    def __init__(self, x):
        self.x = x
    def forward(self, h):
        for b in range(len(self.x)):
            for t, _ in enumerate(self.x[b]):
                h = torch.tanh(h + self.x[b, t])
        return h
def run(x, h):
    return Model(x).forward(h)
"""


@pytest.mark.parametrize("text", [LOOP, NESTED])
def test_states_and_gradients_are_the_same(text: str) -> None:
    new = rewrite(PATCH, text)
    assert ".unbind(" in new and "x[b, t]" not in new and "x[:, t" not in new
    found = []
    for module in (compiled(text), compiled(new)):
        x = torch.linspace(-1, 1, 24).view(2, 4, 3).requires_grad_()
        h = module.run(x, torch.zeros(2, 3))
        h.sum().backward()
        found.append((h, x.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return h", "        x[0, 0] = 1\n    return h"),
        ("    return h", "        x = x * 2\n    return h"),
        ("    return h", "        t = t + 1\n    return h"),
        ("x[:, t, :]", "x[:, t, 0]"),
        ("x[:, t, :]", "x[:, t - 1]"),
        ("range(x.size(1))", "range(-2, 2)"),
        ("range(x.size(1))", "places"),
    ],
)
def test_a_tensor_that_changes_or_another_index_is_refused(old: str, new: str) -> None:
    assert old in LOOP
    with pytest.raises(Refused):
        PATCH.rewrite(SourceFile(LOOP.replace(old, new)), ())
