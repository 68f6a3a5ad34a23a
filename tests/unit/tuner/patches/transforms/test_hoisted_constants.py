"""What moves before a loop, and what stays in it."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.hoisted_constants import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

TEXT = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(3, 2)
        self.drop = nn.Dropout(0.5)
    def forward(self, x, device="cpu"):
        out = []
        for b in range(len(x)):
            for t in range(3):
                out.append(x[b, t] + self.kind(torch.tensor([1], device=device)))
            out.append(-self.kind(torch.tensor([1], device=device)))
        return torch.cat(out)
"""


def test_a_module_called_on_a_constant_is_called_once() -> None:
    new = rewrite(PATCH, TEXT)
    assert new.count("self.kind(") == 1 and new.index("constant = self.kind(") < new.index("for b in")
    found = []
    for module in (compiled(TEXT), compiled(new)):
        torch.manual_seed(0)
        model = module.Model()
        out = model(torch.arange(12.0).view(2, 3, 2))
        out.square().sum().backward()
        found.append((out, model.kind.weight.grad))
    torch.testing.assert_close(found[0], found[1])
    inner = TEXT.replace("for t in", "device = names[b]\n            for t in")
    new = rewrite(PATCH, inner)
    assert new.index("for b in") < new.index("constant =")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tensor([1]", "tensor([b]"),
        ("self.kind(", "self.drop("),
        ("            for t in", "            out[-1].sum().backward()\n            for t in"),
        ("            for t in", "            self.kind = None\n            for t in"),
    ],
)
def test_what_changes_in_the_loop_stays_there(old: str, new: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new)
    try:
        changed = PATCH.rewrite(SourceFile(text), ())
    except Refused:
        return
    before = changed[: changed.index("for b in")]
    assert "self.kind(" not in before and "self.drop(" not in before and "[b]" not in before


def test_a_tensor_that_is_stored_or_filled_stays_in_the_loop() -> None:
    for body in (
        "out.append(torch.zeros(3))",
        "y = torch.zeros(3)\n        y[i] = 1",
        "f(torch.zeros(3))",
    ):
        with pytest.raises(Refused, match="stays the same"):
            PATCH.rewrite(
                SourceFile(f"import torch\ndef g(out):\n    for i in range(9):\n        {body}\n"), ()
            )
