"""What can be seen in a file: names, changes, imports."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import (
    Refused,
    Source,
    base_name,
    bindings,
    changed_names,
    expression,
    free_name,
    names,
    statements,
    with_import,
)


def block(text: str) -> Source:
    return Source(text)


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
    assert "x" in {each.value for each in bindings(block(text).module)}


@pytest.mark.parametrize(
    "text", ["x[0] = 1", "x.append(1)", "x.add_(1)", "x.grad.zero_()", "x.y = 2", "del x[0]"]
)
def test_every_way_to_change_an_object_is_seen(text: str) -> None:
    assert "x" in changed_names(block(text).module)
    assert "x" not in changed_names(block("y = x.sum() + x[0]").module)


def test_an_import_goes_below_the_others_once() -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\nimport torch\n\nx = 1\n'
    new = with_import(text, "from flatout.data import ragged")
    assert new == text.replace("torch\n", "torch\nfrom flatout.data import ragged\n")
    assert with_import(new, "from flatout.data import ragged") == new
    assert with_import('"""Doc."""\nx = 1\n', "import torch").startswith('"""Doc."""\nimport torch\n')


def test_a_file_that_is_not_python_is_refused() -> None:
    with pytest.raises(Refused, match="not Python"):
        Source("def (:\n")


def test_new_names_are_free_and_statements_are_read() -> None:
    assert free_name(Source("built = built_2 = 1\n"), "built") == "built_3"
    assert len(statements("a = 1\nfor b in c:\n    d()\n")) == 2
