"""Dataclasses to JSON and back: what goes out comes in, and damage is named by its place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.ground.codec import WrongShape, decode, encode, map_floats, name_nonfinite, round_floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    name: str
    size: int | None = None
    share: float = 0.0


Late = Literal["autumn", "winter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    leaves: tuple[Leaf, ...]
    kind: Literal["oak", "elm"]
    by_name: dict[str, Leaf] = field(default_factory=dict)
    root: Leaf | None = None
    value: int | str = 0
    flag: bool = False
    season: Literal["spring"] | Late | None = None
    anything: Any = None


finite = st.floats(allow_nan=False, allow_infinity=False)
leaf_values = st.builds(Leaf, name=st.text(), size=st.none() | st.integers(), share=finite)
tree_values = st.builds(
    Tree,
    leaves=st.lists(leaf_values, max_size=3).map(tuple),
    kind=st.sampled_from(["oak", "elm"]),
    by_name=st.dictionaries(st.text(), leaf_values, max_size=3),
    root=st.none() | leaf_values,
    value=st.integers() | st.text(),
    flag=st.booleans(),
    season=st.sampled_from([None, "spring", "winter"]),
    anything=st.none() | st.lists(st.integers()),
)


@given(tree_values)
def test_what_is_encoded_decodes_to_the_same(tree: Tree) -> None:
    assert decode(Tree, json.loads(json.dumps(encode(tree)))) == tree


@given(tree_values)
def test_encoded_values_are_plain_json(tree: Tree) -> None:
    assert json.loads(json.dumps(encode(tree))) == encode(tree)


def test_an_unknown_key_is_ignored_and_a_default_fills_a_missing_one() -> None:
    assert decode(Leaf, {"name": "a", "from_the_future": 1}) == Leaf(name="a")


def test_a_whole_number_serves_as_a_float_but_a_flag_does_not() -> None:
    assert decode(Leaf, {"name": "a", "share": 1}).share == 1.0
    with pytest.raises(WrongShape, match=r"Leaf\.share is bool, expected float"):
        decode(Leaf, {"name": "a", "share": True})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^Tree is list, expected an object$"),
        ({"kind": "oak"}, r"^Tree\.leaves is missing$"),
        ({"leaves": {}, "kind": "oak"}, r"^Tree\.leaves is dict, expected a list$"),
        ({"leaves": [], "kind": "ash"}, r"^Tree\.kind is 'ash', expected one of \('oak', 'elm'\)$"),
        (
            {"leaves": [{"name": "a"}, {"name": 3}], "kind": "oak"},
            r"^Tree\.leaves\[1\]\.name is int, expected str$",
        ),
        ({"leaves": [], "kind": "oak", "by_name": []}, r"^Tree\.by_name is list, expected an object$"),
        ({"leaves": [], "kind": "oak", "by_name": {"x": {}}}, r"^Tree\.by_name\.x\.name is missing$"),
        (
            {"leaves": [], "kind": "oak", "root": {"name": "a", "size": 1.5}},
            r"^Tree\.root\.size is float, expected int$",
        ),
        (
            {"leaves": [], "kind": "oak", "season": "may"},
            r"^Tree\.season is 'may', expected one of \('spring', 'autumn', 'winter'\)$",
        ),
        ({"leaves": [], "kind": "oak", "value": []}, r"^Tree\.value is list, expected str$"),
        ({"leaves": [], "kind": "oak", "flag": None}, r"^Tree\.flag is NoneType, expected bool$"),
    ],
)
def test_damage_is_named_by_its_path(data: Any, message: str) -> None:
    with pytest.raises(WrongShape, match=message):
        decode(Tree, data)


def test_floats_are_changed_wherever_they_lie_and_nothing_else_is() -> None:
    values = {"a": [1.5, 2, "3.5", None, True], "b": ({"c": 4.25},)}
    assert map_floats(values, lambda number: -number) == {
        "a": [-1.5, 2, "3.5", None, True],
        "b": [{"c": -4.25}],
    }
    assert round_floats({"a": [1.23456789, 7]}, digits=3) == {"a": [1.23, 7]}


def test_numbers_that_json_lacks_are_named() -> None:
    named = name_nonfinite([float("nan"), float("inf"), float("-inf"), 0.5])
    assert named == ["nan", "inf", "-inf", 0.5]
