"""One tensor holds what many held; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.one_tensor import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.drop = nn.Dropout(0.5)

    def forward(self, boards, device="cpu"):
"""
VARIANTS = {
    "nested loops": """
        pieces = []
        for board in boards:
            for kind in board:
                index = torch.tensor([kind], device=device)
                pieces.append(self.body(self.kind(index)))
        return torch.cat(pieces).view(len(boards), -1, 3)
""",
    "comprehension": """
        return torch.stack([self.kind(torch.tensor(board, device=device)) for board in boards])
""",
    "plain tensors": """
        return self.kind(torch.stack([torch.tensor(board) for board in boards]))
""",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients_are_the_same(name: str) -> None:
    text = MODEL + VARIANTS[name]
    found = []
    for module in (compiled(text), compiled(rewrite(PATCH, text))):
        torch.manual_seed(0)
        model = module.Model()
        out = model([[0, 1], [4, 4]])
        out.square().sum().backward()
        found.append([out, *(each.grad for each in model.parameters() if each.grad is not None)])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("self.body(", "self.drop(", "treat each row alone"),
        ("[kind]", "[kind, kind]", "not have one entry each"),
        ("device=device)", "device=kind)", "may change from tensor to tensor"),
        ("torch.tensor([kind]", "torch.tensor([read(kind)]", "does more than fill"),
        ("self.body(self.kind(index))", "index * 2", "are not made here"),
    ],
)
def test_what_cannot_be_seen_is_refused(old: str, new: str, words: str) -> None:
    text = MODEL + VARIANTS["nested loops"]
    assert old in text
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(SourceFile(text.replace(old, new)), ())
