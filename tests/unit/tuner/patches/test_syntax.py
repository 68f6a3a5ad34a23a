"""What a node says by itself: names, changes."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import SourceFile, expression
from flatout.tuner.patches.syntax import base_name, bindings, changed_names, names


def test_names_are_those_that_are_looked_up() -> None:
    assert names(expression("f(x.y, key=z[i]) + self.a.b")) == {"f", "x", "z", "i", "self"}
    assert base_name(expression("self.a.b[0]")) == "self.a" and base_name(expression("x[0].y()")) == "x"
    assert base_name(expression("(a + b)[0]")) is None


@pytest.mark.parametrize(
    "text", ["del x", "x = 1", "x += 1", "x: int = 1", "for x in y: pass", "with f() as x: pass",
             "(a, (x, b)) = y", "def x(): pass", "if (x := f()): pass", "import x.y", "import a as x",
             "[x for x in y]"],
)  # fmt: skip
def test_every_way_to_bind_a_name_is_seen(text: str) -> None:
    assert "x" in {each.value for each in bindings(SourceFile(text).module)}


@pytest.mark.parametrize(
    "text", ["x[0] = 1", "x.append(1)", "x.add_(1)", "x.grad.zero_()", "x.y = 2", "del x[0]"]
)
def test_every_way_to_change_an_object_is_seen(text: str) -> None:
    assert "x" in changed_names(SourceFile(text).module)
    assert "x" not in changed_names(SourceFile("y = x.sum() + x[0]").module)
