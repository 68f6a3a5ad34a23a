from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.errors import BadInput, FlatoutError
from flatout.planner.config.documents import Document, Format, Value, parse_document
from flatout.planner.config.edits import edit_scalars, means
from tests.support.planner import CONFIG


def parse(text: str, *, format: Format = "yaml") -> Document:  # noqa: A002
    return parse_document(text, name="c", format=format)


def edited(text: str, changes: dict[str, Value], *, format: Format = "yaml") -> str:  # noqa: A002
    return edit_scalars(parse(text, format=format), changes).text


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        ("a: 4  # c", 45, "a: 45  # c"),
        ("a: '4'", 45, "a: '45'"),
        ('a: "4"', 45, 'a: "45"'),
        ("a: 2e-4", 0.00002, "a: 2.0e-05"),
        ("a: true", False, "a: false"),
        ("a: yes", False, "a: false"),
        ("a: ~", 3, "a: 3"),
        ("a: 32", "bf16-mixed", "a: bf16-mixed"),
        ("a: fp32", "32", 'a: "32"'),
        ("a: x", "on", 'a: "on"'),
        ("a: x", "2024-01-31", 'a: "2024-01-31"'),
        ("a: x", "y: z # no", 'a: "y: z # no"'),
        ("a: 'x'", "it's", "a: 'it''s'"),
        ("a: 'x'", "two\nlines", 'a: "two\\nlines"'),
        ("a: 1", None, "a: null"),
        ("a: &b 3\nc: *b", 4, "a: &b 4\nc: *b"),
        ('a: !!str "3"', 4, 'a: !!str "4"'),
        ("{a: 1, b: 2}", 12, "{a: 12, b: 2}"),
        ("a: one\n  two # c\nb: 1", 5, "a: 5 # c\nb: 1"),
        ("b: 1\r\na: 2\r\n", 3, "b: 1\r\na: 3\r\n"),
        ("a: 1\na: 2\n# end", 3, "a: 1\na: 3\n# end"),
    ],
)
def test_only_the_characters_of_the_value_change(before: str, value: Value, after: str) -> None:
    assert edited(before, {"a": value}) == after


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        ('{"a":4}', 45, '{"a":45}'),
        ('{\n\t"a" : "4",\r\n "b": 1 }', 45, '{\n\t"a" : "45",\r\n "b": 1 }'),
        ('{"a": false}', True, '{"a": true}'),
        ('{"a": 1e-4}', "text", '{"a": "text"}'),
        ('{"a": 1, "a": 2}', 3, '{"a": 1, "a": 3}'),
        ('\ufeff{"a": 1}', 2, '\ufeff{"a": 2}'),
    ],
)
def test_json_likewise(before: str, value: Value, after: str) -> None:
    assert edited(before, {"a": value}, format="json") == after


def test_several_at_once_in_a_config_with_real_dirt() -> None:
    changes: dict[str, Value] = {
        "training.trainer.accumulate_grad_batches": 2,
        "data_loader.batch_size": 32,
        "training.learning_rate": 1e-4,
    }
    done = edit_scalars(parse(CONFIG), changes)
    assert done.text == (
        CONFIG.replace("batch_size: 4 ", "batch_size: 32 ")
        .replace("accumulate_grad_batches: 16", "accumulate_grad_batches: 2")
        .replace("learning_rate: 2e-4", "learning_rate: 0.0001")
    )
    (warning,) = done.warnings
    assert warning == (
        "training.learning_rate is given 2 times in c; "
        "the last one (line 12) counts and is the one that is changed"
    )


def test_an_anchor_that_others_use_is_changed_with_a_warning() -> None:
    done = edit_scalars(parse("a: &x 1\nb: *x\nc: *x\n"), {"a": 2})
    assert done.warnings == ("2 other values of c follow a through an alias and change with it",)
    assert yaml.safe_load(done.text) == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("a: &x 1\nb: *x\n", "b", r"b in c \(line 1\) is an alias: its characters stand at a"),
        ("m: &m {x: 1}\nn: {<<: *m}\n", "n.x", "is an alias: its characters stand at m.x"),
        ("a: |\n  1\n", "a", "is a block scalar, which is not edited"),
        ("a: >-\n  1\n", "a", "is a block scalar"),
        ("a:\nb: 1\n", "a", "has no value to replace"),
        ("a: {b: 1}\n", "a", "is a mapping, not a value"),
        ("a: [1]\n", "a", "is a list, not a value"),
        ("batch_sise: 1\n", "batch_size", "has no key batch_size .*nearest: batch_sise"),
    ],
)
def test_what_is_not_edited_is_said_in_one_sentence(text: str, key: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        edit_scalars(parse(text), {key: 2})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_no_config_can_hold(value: float) -> None:
    with pytest.raises(BadInput, match="is not a number that a config can hold"):
        edited("a: 1.0", {"a": value})


def test_an_edit_that_would_move_another_value_is_refused() -> None:
    """A key that is an alias: whoever changes the value renames the key."""
    with pytest.raises(FlatoutError, match="changing x in c would change other values too"):
        edit_scalars(parse("x: &k key\n*k : 1\n"), {"x": "other"})


def test_a_number_in_quotes_means_the_number() -> None:
    assert means("4", 4)
    assert means("true", True)
    assert not means("4", "5")
    assert not means(1, True)


# Any text: only the value's characters differ, and what is read back is what was asked for.

names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(
    lambda name: isinstance(yaml.safe_load(name), str)
)
spaces = st.sampled_from(["", " ", "   "])
comments = st.sampled_from(["", " # c", "   # a: 1, {b}", " #"])
values: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(max_size=12),
)
old_values = st.one_of(
    st.integers(0, 10**6).map(str),
    st.sampled_from(
        ["2e-4", "true", "null", "bf16-mixed", "'a ''b'''", '"x\\ty"', '"4"', "'4'", "a b", "!!str 7"]
    ),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)


@st.composite
def block_yaml(draw: st.DrawFn) -> tuple[str, str]:
    """A text and the dotted key to edit in it."""
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    lines: list[str] = []
    indents: list[str] = []
    path: list[str] = []
    keys: list[str] = []
    used: set[str] = set()
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            lines.append(draw(st.sampled_from(["", "# a comment: 1", "   # indented"])))
        if indents and draw(st.booleans()):
            indents.pop()
            path.pop()
        name = draw(names)
        full = ".".join([*path, name])
        if full in used:
            continue
        used.add(full)
        quote = draw(st.sampled_from(["", "'", '"']))
        shown = f"{''.join(indents)}{quote}{name}{quote}{draw(spaces) if quote else ''}:"
        if draw(st.booleans()) and len(path) < 3:
            lines.append(shown + draw(comments))
            path.append(name)
            indents.append(draw(st.sampled_from(["  ", "    "])))
            name = draw(names)
            full = ".".join([*path, name])
            used.add(full)
            shown = f"{''.join(indents)}{name}:"
        lines.append(f"{shown} {draw(spaces)}{draw(old_values)}{draw(comments)}")
        keys.append(full)
    text = newline.join(lines) + draw(st.sampled_from(["", newline]))
    assume(keys)
    return text, draw(st.sampled_from(keys))


@given(block_yaml(), values)
def test_any_block_yaml(case: tuple[str, str], value: Any) -> None:
    text, key = case
    check_edit(text, key, value, format="yaml")


@given(
    st.dictionaries(names, old_values.filter(lambda old: old != "a b"), min_size=1, max_size=5),
    st.data(),
    values,
)
def test_any_flow_mapping(entries: dict[str, str], data: st.DataObject, value: Any) -> None:
    space = data.draw(spaces)
    text = "outer: {" + f",{space} ".join(f"{name}: {space}{old}" for name, old in entries.items()) + "}"
    check_edit(text, f"outer.{data.draw(st.sampled_from(list(entries)))}", value, format="yaml")


@given(st.dictionaries(names, values, min_size=1, max_size=5), st.data(), values)
def test_any_json(entries: dict[str, Any], data: st.DataObject, value: Any) -> None:
    indent = data.draw(st.sampled_from([None, 2, "\t"]))
    text = json.dumps({"outer": entries}, indent=indent, ensure_ascii=data.draw(st.booleans()))
    check_edit(text, f"outer.{data.draw(st.sampled_from(list(entries)))}", value, format="json")


def check_edit(text: str, key: str, value: Any, *, format: Format) -> None:  # noqa: A002
    before = parse(text, format=format)
    scalar = before.scalars[key]
    done = edited(text, {key: value}, format=format)
    tail = len(text) - scalar.end
    assert done.startswith(text[: scalar.start])
    assert done.endswith(text[scalar.end :]) and len(done) >= scalar.start + tail
    after = parse(done, format=format)
    assert means(after.scalars[key].value, value)
    assert {k: s.value for k, s in after.scalars.items() if k != key} == {
        k: s.value for k, s in before.scalars.items() if k != key
    }
    assert after.scalars[key].quotes in (scalar.quotes, "double")
    loaded = json.loads(done) if format == "json" else yaml.safe_load(done)
    for part in key.split("."):
        loaded = loaded[part]
    if scalar.quotes == "plain" and "!!str" not in text[: scalar.start].rpartition("\n")[2]:
        assert loaded == value and type(loaded) is type(value)


@pytest.mark.parametrize(
    ("line", "speaks"),
    [
        ("a: 16   # effective batch: 4 x 16 = 64", True),
        ("a: 16   # of 160 rows, 1.16 each", False),
        ("a: 16", False),
        ("a: 16   # rows", False),
    ],
)
def test_a_comment_that_names_the_old_value_is_pointed_out(line: str, speaks: bool) -> None:
    text = f"{line}\nb: 16  # 16\n"
    edited = edit_scalars(parse_document(text, name="c", format="yaml"), {"a": 8})
    assert edited.text == text.replace("a: 16", "a: 8", 1)
    assert edited.warnings == (("the comment beside a (c:1) speaks of 16",) if speaks else ())
