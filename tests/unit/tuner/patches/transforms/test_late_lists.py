"""Lists that are read late hold what they held; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.late_lists import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

TEXT = """
def train(values):
    losses, said = [], []
    losses = []
    for step, loss in enumerate(values):
        losses.append((loss * 2).item())
        if step % 2 == 1:
            said.append(f"{sum(losses) / len(losses):.6f} {losses[-1]} {losses[-2:]}")
    return said, losses
"""


def test_the_same_numbers_are_read() -> None:
    text = TEXT.replace("    losses, said = [], []\n", "    said = []\n")
    new = rewrite(PATCH, text)
    assert "(loss * 2).detach().clone()" in new and "losses[-1].item()" in new and "len(losses)" in new
    values = [torch.tensor(0.1 * n, requires_grad=True) for n in range(5)]
    assert compiled(text).train(values) == compiled(new).train(values)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    losses = []\n", "    losses = read()\n", "not start as an empty list"),
        ("", "", "cannot be traced"),
        ("said, losses\n", "said, losses.copy()\n", "copy is used"),
        ("    for step", "    losses.append(3)\n    for step", "holds more"),
        ("    for step", "    def show():\n        return losses\n    for step", "another function"),
        ("        if step", "        losses[0] = 1\n        if step", "is changed"),
    ],
)
def test_what_cannot_be_followed_is_refused(old: str, new: str, words: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    if old:
        text = text.replace("    losses, said = [], []\n", "    said = []\n")
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(SourceFile(text), ())
