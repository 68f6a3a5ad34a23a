from __future__ import annotations

import linecache
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flatout.measure.arms.knock_out.blocks import find_function, inner_blocks, whole_block
from flatout.measure.arms.knock_out.rewrite import KNOCK_OUT, CannotRewrite, parse_file, rewritten

SOURCE = '''
class Model:
    def __init__(self, size):
        self.__size = size

    def forward(self, x, *, scale=2):
        """Doubles."""
        hidden = list(map(scale.__mul__, x))
        total = sum(hidden) + self.__size
        if total > 1000:
            return None
        return total + len(hidden)

def outer(step):
    def inner(x):
        return x + step
    return inner
'''


class Switch:
    """Answers a rewritten function as a test wants it."""

    def __init__(self, *, free: bool = False, given: Any = ()) -> None:
        self.free, self.given = free, given
        self.noted: list[Any] = []

    def is_free(self) -> bool:
        return self.free

    def note(self) -> None:
        self.noted.append("note")

    def note_returned(self, value: Any) -> Any:
        self.noted.append(value)
        return value

    def give(self) -> Any:
        return self.given

    def give_returned(self) -> Any:
        return "given"


@pytest.fixture
def module(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(SOURCE))
    linecache.checkcache()
    variables: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), variables)
    return variables


def rewrite(module: dict[str, Any], function: Any, number: int | None) -> None:
    """Switch the whole function, or its block of this number."""
    path, code = module["__file__"], function.__code__
    tree = parse_file(path)
    assert tree is not None
    node = find_function(tree, code.co_name, code.co_firstlineno)
    assert node is not None
    block = whole_block(node, tree)
    chosen = block if number is None else inner_blocks(node, block, tree)[number]
    function.__code__ = rewritten(code, path, chosen)


def test_a_function_runs_as_it_is_and_notes_what_it_returns(module: dict[str, Any]) -> None:
    model = module["Model"](5)
    before = model.forward([1, 2])
    switch = module[KNOCK_OUT] = Switch()
    rewrite(module, module["Model"].forward, None)
    assert model.forward([1, 2]) == before == 13
    assert model.forward([1000]) is None
    assert switch.noted == [13, None]
    switch.free = True
    assert model.forward([1, 2]) == "given"


def test_a_run_of_statements_gives_what_it_binds(module: dict[str, Any]) -> None:
    model = module["Model"](5)
    switch = module[KNOCK_OUT] = Switch()
    rewrite(module, module["Model"].forward, 0)
    assert model.forward([1, 2], scale=3) == 16
    assert switch.noted == ["note"]
    switch.free, switch.given = True, ([0, 0, 0],)
    assert model.forward([1, 2]) == 8  # three values of zero, and the size


def test_line_numbers_and_signatures_stay(module: dict[str, Any]) -> None:
    forward = module["Model"].forward
    lines = {line for *_, line in forward.__code__.co_lines()}
    first = forward.__code__.co_firstlineno
    rewrite(module, forward, 1)
    assert {line for *_, line in forward.__code__.co_lines()} == lines
    assert forward.__code__.co_firstlineno == first
    assert forward.__kwdefaults__ == {"scale": 2}


def test_a_closure_keeps_its_variables(module: dict[str, Any]) -> None:
    inner = module["outer"](10)
    module[KNOCK_OUT] = Switch()
    rewrite(module, inner, None)
    assert inner(1) == 11


def test_a_file_that_changed_since_is_left_alone(module: dict[str, Any]) -> None:
    path = Path(module["__file__"])
    tree = parse_file(str(path))
    assert tree is not None
    code = module["Model"].forward.__code__
    node = find_function(tree, "forward", code.co_firstlineno)
    assert node is not None
    block = whole_block(node, tree)
    path.write_text("\n" + path.read_text())
    linecache.checkcache()
    with pytest.raises(CannotRewrite, match="its source is not the one that runs"):
        rewritten(code, str(path), block)
    path.write_text("def broken(")
    linecache.checkcache()
    assert parse_file(str(path)) is None
