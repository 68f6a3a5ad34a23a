"""Code: its layout survives a vocabulary for prose; the library's functions are found by parsing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.kinds import code_generation
from flatout.engines.adapters.tasks.kinds.code_generation import (
    CodeGeneration,
    functions,
    functions_of,
    with_layout_signs,
    without_layout_signs,
)
from tests.support.adapters import tiny_tokenizer

NESTED = "def f(x):\n    if x:\n        return 1\n    return 2"

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


def test_layout_signs_by_hand() -> None:
    assert with_layout_signs(NESTED) == "def f(x):¶»if x:¶»»return 1¶»return 2"
    assert with_layout_signs("def f():\r\n\tx = 1\r\n\r\n\treturn x ") == "def f():¶»x = 1¶»return x"
    assert (
        with_layout_signs("for w in x:\n m = 1\n if m:\n     y()\nz()")
        == "for w in x:¶»m = 1¶»if m:¶»»y()¶z()"
    )


def test_a_vocabulary_for_prose_keeps_lines_and_indents() -> None:
    task, tokenizer = CodeGeneration(), tiny_tokenizer()
    example = task.encode({"docstring": "x", "code": NESTED}, tokenizer, max_length=9)
    text = tokenizer.decode(example.targets["ids"].tolist(), skip_special_tokens=True)
    lines = [
        (len(line) - len(line.lstrip()), line.split()[0]) for line in task.from_vocabulary(text).split("\n")
    ]
    assert lines == [(0, "def"), (4, "if"), (8, "return"), (4, "return")]


@given(
    st.recursive(
        st.just(["y = 1"]),
        lambda body: st.lists(body, min_size=1, max_size=3).map(
            lambda parts: ["if x:", *(f"    {line}" for part in parts for line in part)]
        ),
        max_leaves=8,
    )
)
def test_layout_comes_back(lines: list[str]) -> None:
    code = "\n".join(lines)
    assert without_layout_signs(with_layout_signs(code)) == code


def test_lines_with_text_are_read() -> None:
    task = CodeGeneration()
    assert task.record_of({"text": "Add.", "code": "x", "task_id": 1}) == {"docstring": "Add.", "code": "x"}


def test_generated_code_is_python() -> None:
    for record in CodeGeneration().generated(40, seed=0):
        assert isinstance(ast.parse(record["code"]).body[0], ast.FunctionDef)


def test_the_standard_library_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"Do thing {number} well.", f"def f{number}():\n    pass") for number in range(60)]
    monkeypatch.setattr(code_generation, "functions", lambda: pairs)
    splits = CodeGeneration().records(DataOptions())
    assert splits.origin == "functions of Python's standard library"
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 60


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
        assert code_generation.MIN_WORDS <= len(docstring.split()) <= code_generation.MAX_WORDS
        assert len(code) <= code_generation.MAX_CODE_CHARACTERS
        assert isinstance(ast.parse(code).body[0], ast.FunctionDef)
        assert docstring[:20] not in code
