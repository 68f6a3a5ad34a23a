"""Lists that a loop or a comprehension fills and one call joins."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.joined_lists import JoinedList, find_joined_lists, index_parts, parenthesise
from flatout.tuner.patches.source import SourceFile, expression

TEXT = """
def f(a, b):
    out = []
    for x in a:
        for y in x:
            z = y + 1
            out.append(b[z * 2])
    return torch.stack(out)
"""


def only(text: str, *lines: int) -> JoinedList | str:
    (found,) = find_joined_lists(SourceFile(text), lines, {})
    return found


def test_clauses_and_element_are_those_of_the_loops() -> None:
    found = only(TEXT)
    assert isinstance(found, JoinedList)
    assert found.clauses == "for x in a for y in x" and found.names == {"x", "y"} and len(found.removed) == 2
    assert SourceFile("").code(found.element) == "b[(y + 1) * 2]" and found.joined == "stack"
    assert list(find_joined_lists(SourceFile(TEXT), (2,), {})) == [] and only(TEXT, 6) != []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return torch.stack(out)", "return torch.stack(out), len(out)", "out is read again"),
        ("            z = y + 1", "            z = next(y)", "does more"),
        ("    return", "    print(z)\n    return", "z is read again"),
    ],
)
def test_a_list_with_other_readers_or_effects_is_left_alone(old: str, new: str, words: str) -> None:
    found = only(TEXT.replace(old, new))
    assert isinstance(found, str) and words in found


def test_indices_are_read_from_any_kind_of_brackets() -> None:
    found = index_parts(expression("self.x[i][j, 0]"))
    assert found is not None and found[0] == "self.x" and len(found[1]) == 3
    assert index_parts(expression("x[i:j]")) is None and index_parts(expression("f(x)[i]")) is None
    assert SourceFile("").code(parenthesise(expression("a + b"))) == "(a + b)"
