"""What gives the same value each time, and what may not."""

from __future__ import annotations

import libcst as cst
import pytest

from flatout.tuner.patches.purity import has_one_row, impure_part, module_kinds
from flatout.tuner.patches.source import SourceFile, expression
from flatout.tuner.patches.syntax import walk

CLASS = """
class Model(nn.Module):
    def __init__(self):
        self.kind = nn.Embedding(3, 4)
        self.small = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.random = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        self.norm = nn.Embedding(3, 4, max_norm=1.0)
        self.twice = nn.Linear(4, 4)

    def again(self):
        self.twice = nn.Dropout(0.5)
"""


def kinds() -> dict[str, str]:
    source = SourceFile(CLASS)
    last = next(each for each in walk(source.module) if isinstance(each, cst.Name) and each.value == "again")
    return module_kinds(source, last)


@pytest.mark.parametrize(
    "text", ["x + 1", "self.kind(torch.tensor([0], device=d))", "-x[0, 1:2].float()", "self.small(x)",
             "torch.zeros(len(x), 3)", "a if b > 0 else c", "F.relu(x)", "(x, [y])"],
)  # fmt: skip
def test_these_give_the_same_each_time(text: str) -> None:
    assert impure_part(expression(text), kinds()) is None


@pytest.mark.parametrize(
    "text", ["torch.rand(3)", "self.random(x)", "self.norm(x)", "self.twice(x)", "self.unknown(x)", "f(x)",
             "x.add_(1)", "next(it)", "F.dropout(x)", "[y for y in x]", "(y := x)", "f(*x)"],
)  # fmt: skip
def test_these_may_not(text: str) -> None:
    assert impure_part(expression(text), kinds()) is not None


def test_one_row_is_seen_in_what_makes_it() -> None:
    assert has_one_row(expression("x + self.kind(torch.tensor([0]))")) and has_one_row(
        expression("x.unsqueeze(0)")
    )
    assert not has_one_row(expression("x + self.kind(torch.tensor([0, 1]))")) and not has_one_row(
        expression("x")
    )
