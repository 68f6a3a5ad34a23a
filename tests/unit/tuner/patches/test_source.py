"""A file as a tree, and texts made of it."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import Refused, SourceFile, free_name, statements, with_import


def test_an_import_goes_below_the_others_once() -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\nimport torch\n\nx = 1\n'
    new = with_import(text, "from flatout.data import ragged")
    assert new == text.replace("torch\n", "torch\nfrom flatout.data import ragged\n")
    assert with_import(new, "from flatout.data import ragged") == new
    assert with_import('"""Doc."""\nx = 1\n', "import torch").startswith('"""Doc."""\nimport torch\n')


def test_a_file_that_is_not_python_is_refused() -> None:
    with pytest.raises(Refused, match="not Python"):
        SourceFile("def (:\n")


def test_new_names_are_free_and_statements_are_read() -> None:
    assert free_name(SourceFile("built = built_2 = 1\n"), "built") == "built_3"
    assert len(statements("a = 1\nfor b in c:\n    d()\n")) == 2
