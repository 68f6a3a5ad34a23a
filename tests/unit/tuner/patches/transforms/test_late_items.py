"""Sums that are read late are the sums; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.late_items import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

TEXT = """
def train(losses, labels):
    total, hits, said = 0.0, 0, []
    for step, loss in enumerate(losses):
        total += loss.item()
        hits += (labels == step % 2).sum().item()
        if step % 2 == 1:
            said.append(f"{total / 2:.6f} {hits}")
            total = 0.0
    return said, total, hits
"""


def test_the_same_numbers_are_said_in_the_same_form() -> None:
    new = rewrite(PATCH, TEXT)
    assert ".item()" not in new and "float(total) / 2" in new and "int(hits)" in new
    losses, labels = [torch.tensor(0.1 * n) for n in range(5)], torch.tensor([0, 1, 1])
    said = [compiled(text).train(losses, labels) for text in (TEXT, new)]
    assert said[0] == said[1] and isinstance(said[1][1], float)


def test_a_loss_times_its_batch_is_summed_late() -> None:
    text = TEXT.replace("loss.item()", "loss.item() * len(labels)")
    new = rewrite(PATCH, text)
    assert "loss.detach().double() * len(labels)" in new
    losses, labels = [torch.tensor(0.1 * n) for n in range(5)], torch.tensor([0, 1, 1])
    assert compiled(text).train(losses, labels) == compiled(new).train(losses, labels)


def test_only_the_line_of_the_finding_changes() -> None:
    new = rewrite(PATCH, TEXT, 5)
    assert "loss.item()" not in new and ".sum().item()" in new


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("            total = 0.0", "            total *= 0.5", "by more than adding"),
        ("0.0, 0, []", "start()", "not start as a number"),
        ("    for step", "    def show():\n        return total\n    for step", "another function"),
        ("(losses, labels)", "(losses, labels, total)", "an argument of the function"),
    ],
)
def test_what_cannot_be_followed_is_refused(old: str, new: str, words: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(
            SourceFile(text), (next(n for n, x in enumerate(text.split("\n"), 1) if "loss.item" in x),)
        )
