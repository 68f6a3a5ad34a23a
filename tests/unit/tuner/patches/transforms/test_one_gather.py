"""Sequences built by one gather are those that the loop builds, with the same gradients; or a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.one_gather import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

DARKROOM = Path(__file__).parents[5] / "examples" / "darkroom"

HEAD = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(3, 4)
        self.begin = nn.Parameter(torch.ones(1, 4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x, query, lengths):
"""
NESTED = """
        out = []
        for i, n in enumerate(lengths):
            parts = [self.begin]
            limit = n - 1
            for k in range(1, limit):
                row = x[i][k].unsqueeze(0)
                parts.append(row * 2 + self.kind(torch.tensor([1])))
            if n > 3:
                parts += [self.begin * 3]
            else:
                parts.extend([self.begin * 5, self.begin])
            parts.append(query[i])
            whole = torch.cat(parts)
            out.append(whole)
        return pad_sequence(out, batch_first=True)
"""
ZIPPED = """
        out = []
        for rows, last, n in zip(x, query, lengths):
            parts = []
            for k in range(n):
                parts.append(rows[k])
            parts.append(last[0])
            out.append(torch.stack(parts))
        return sum(part.sum() * len(part) for part in out)
"""
PADDED = """
        out = []
        for b in range(len(x)):
            parts = []
            for k in range(lengths[b]):
                parts.append(x[b, k])
            parts.append(self.begin[0])
            out.append(torch.stack(parts, dim=0))
        most = max(map(len, out))
        padded = []
        for part in out:
            padded.append(torch.nn.functional.pad(part, (0, 0, 0, most - len(part))))
        return torch.stack(padded) * most
"""


def outputs(module: ModuleType) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = module.Model()
    x = torch.randn(3, 6, 4, requires_grad=True)
    query = torch.randn(3, 1, 4, requires_grad=True)
    result = model(x, query, [6, 2, 4])
    result.square().sum().backward()
    own = [each.grad for each in model.parameters() if each.grad is not None]
    return [result.detach(), x.grad, query.grad, *own]  # type: ignore[list-item]


@pytest.mark.parametrize("body", [NESTED, PADDED])
def test_the_gather_computes_what_the_loop_computes(body: str) -> None:
    text = HEAD + body
    new = rewrite(PATCH, text)
    assert "ragged.concat" in new and "for k in" not in new and "torch.stack" not in new
    for one, other in zip(outputs(compiled(text)), outputs(compiled(new)), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_other_readers_get_a_list_of_sequences() -> None:
    text = (HEAD + ZIPPED).replace("parts.append(last[0])", "parts.append(self.begin[0])")
    new = rewrite(PATCH, text)
    assert "unbind(0)" in new
    for one, other in zip(outputs(compiled(text)), outputs(compiled(new)), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_the_darkroom_job_becomes_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DARKROOM))
    text = (DARKROOM / "model.py").read_text()
    new = rewrite(PATCH, text, 75, 79)
    assert "for b in range(context.size(0)):" not in new and "torch.zeros(" not in new
    grid = compiled("from dataset import collate, RegionDataset\nfrom histories import *\n")
    goals, _ = grid.split_goals(2, seed=0)
    samples = grid.RegionDataset(grid.learning_histories(goals, histories_per_goal=1, num_steps=160, seed=0))
    batch = grid.collate([samples[number] for number in (0, 30, 85, 159)])
    found: list[list[Any]] = []
    for module in (compiled(text), compiled(new)):
        torch.manual_seed(0)
        model = module.DarkroomTransformer()
        logits = model(batch)
        (logits[0].square().sum() + logits[1].square().sum()).backward()
        found.append([*(each.detach() for each in logits), *(each.grad for each in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name in ("dataset", "histories"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("self.begin * 3]", "self.drop(self.begin)]", "may give another value each time"),
        ("return pad_sequence", "print(k)\n        return pad_sequence", "k is read again"),
        ("            limit = n - 1\n", "            limit = n - 1\n            print(n)\n", "does more"),
        ("            limit = n - 1\n", "            limit = n - 1\n            x = x * 2\n", "x"),
        ("row * 2", "row * query[i]", "depends on i"),
        ("row * 2", "row * query[i][k]", "shapes may differ"),
        ("row * 2", "row * i", "depends on i"),
        ("torch.cat(parts)", "torch.cat(parts, dim=1)", "not joined along the first axis"),
        ("torch.cat(parts)", "torch.stack(parts)", "unsqueeze"),
        ("parts = [self.begin]", "ragged = parts = [self.begin]", "uses the name ragged"),
        (".unsqueeze(0)\n                parts.append(row * 2 + self.kind(torch.tensor([1])))",
         "\n                parts.append(row * 2)", "no axis of their own"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_refused(old: str, new: str, words: str) -> None:
    text = HEAD + NESTED
    assert old in text
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(SourceFile(text.replace(old, new)), ())
