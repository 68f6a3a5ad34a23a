"""Functions are found by parsing, with their first paragraph and without their docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from flatout.engines.adapters.tasks import standard_library
from flatout.engines.adapters.tasks.standard_library import functions, functions_of

MODULE = '''
class Shop:
    @property
    def price(self) -> int:
        """Return the price
        of all things.

        More is not said.
        """
        # a comment
        return self.sum * 2

    def bare(self):
        return 1

    def short(self):
        """Too short."""
        return 2

    def empty(self):
        """Has nothing but a docstring."""

def long(x):
    """Has a body that is long."""
    return "%s"
''' % ("x" * 600)


def test_what_counts() -> None:
    assert list(functions_of(MODULE)) == [
        ("Return the price of all things.", "def price(self):\n    return self.sum * 2")
    ]
    assert list(functions_of("def broken(:")) == list(functions_of("")) == []


def test_files_that_are_left_out(tmp_path: Path) -> None:
    for name in ("shop.py", "test/shop.py", "sub/site-packages/shop.py", "sub/shop.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE, encoding="utf-8")
    (tmp_path / "old.py").write_bytes(b"# \xff")
    assert len(functions(tmp_path)) == 2


def test_a_package_of_the_library_itself() -> None:
    json = Path(ast.__file__).parent / "json"
    found = functions(json)
    assert found
    for docstring, code in found:
        assert standard_library.MIN_WORDS <= len(docstring.split()) <= standard_library.MAX_WORDS
        assert len(code) <= standard_library.MAX_CODE_CHARACTERS
        assert isinstance(ast.parse(code).body[0], ast.FunctionDef)
        assert docstring[:20] not in code
