from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput, FlatoutError
from flatout.planner.config.config_text import (
    Document,
    Format,
    Value,
    edit_scalars,
    means,
    nearest_hint,
    parse_document,
    plain_value,
    read_document,
)
from tests.support.planner import CONFIG


def parse(text: str, *, format: Format = "yaml") -> Document:  # noqa: A002
    return parse_document(text, name="c", format=format)


def characters(document: Document, key: str) -> str:
    scalar = document.scalars[key]
    return document.text[scalar.start : scalar.end]


def test_every_scalar_has_its_own_characters() -> None:
    document = parse(
        "# top\na: 1   # one\n\"b c\": 'it''s'\nd:\n  e: &x 2e-4\n  f: !!int \"5\"\ng: {h: on, i: [1, two]}\n"
        "j: |\n  block\nk:\nl: plain\n  text\n"
    )
    assert {key: (characters(document, key), scalar.value) for key, scalar in document.scalars.items()} == {
        "a": ("1", 1),
        "b c": ("'it''s'", "it's"),
        "d.e": ("2e-4", 2e-4),
        "d.f": ('"5"', "5"),
        "g.h": ("on", True),
        "g.i.0": ("1", 1),
        "g.i.1": ("two", "two"),
        "j": ("|\n  block\n", "block\n"),
        "k": ("", None),
        "l": ("plain\n  text", "plain text"),
    }
    assert document.sections == {"d": "mapping", "g": "mapping", "g.i": "list"}
    assert document.scalars["j"].quotes == "block"
    assert [document.scalars[key].line for key in ("a", "d.e", "g.h")] == [2, 5, 7]


@pytest.mark.parametrize(
    "word",
    ["1", "-7", "+3", "0", "010", "0x1F", "0b101", "1_000", "1.5", "-.5", "2.0e-4", "1e3", "yes", "Off"],
)
def test_plain_values_are_those_of_pyyaml_where_it_reads_a_number_or_a_switch(word: str) -> None:
    loaded = yaml.safe_load(word)
    expected = float(word) if isinstance(loaded, str) else loaded  # 1e3 is a string to YAML 1.1
    assert plain_value(word) == expected
    assert type(plain_value(word)) is type(expected)


@pytest.mark.parametrize(
    ("word", "expected"), [("2e-4", 2e-4), ("1E5", 1e5), ("0o17", 15), ("~", None), ("", None)]
)
def test_plain_values_that_yaml_1_1_reads_otherwise(word: str, expected: Any) -> None:
    assert plain_value(word) == expected


@pytest.mark.parametrize(
    "word", ["16-mixed", "bf16", "1:30", "2024-01-31", "0x", "0b2", "e5", "a b", "-", "."]
)
def test_other_words_are_text(word: str) -> None:
    assert plain_value(word) == word


def test_the_last_of_equal_keys_counts() -> None:
    document = parse("a: 1\nb: {x: 1, y: 2}\na: 2\na: 3\nb: {y: 4}\n")
    assert {key: scalar.value for key, scalar in document.scalars.items()} == {"a": 3, "b.y": 4}
    assert document.scalars["a"].num_ignored == 2
    assert document.scalars["a"].line == 4


def test_aliases_and_merged_keys_name_where_their_characters_are() -> None:
    document = parse("base: &b {x: 1, y: 2}\none: &o 5\ntwo: *o\nmore:\n  <<: *b\n  y: 3\n")
    scalars = document.scalars
    assert (scalars["two"].value, scalars["two"].alias_of) == (5, "one")
    assert (scalars["more.x"].value, scalars["more.x"].alias_of) == (1, "base.x")
    assert (scalars["more.y"].value, scalars["more.y"].alias_of) == (3, None)
    assert (scalars["one"].num_aliases, scalars["base.x"].num_aliases, scalars["base.y"].num_aliases) == (
        1,
        1,
        0,
    )


def test_an_anchor_inside_itself_ends() -> None:
    assert parse("a: &a {b: *a, c: 1}\n").scalars["a.c"].value == 1


def test_a_text_that_unfolds_without_end_is_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    with pytest.raises(BadInput, match="unfolds into more than 20,000 values"):
        parse("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", "c is not valid YAML: line 2"),
        ("a: 1\n  b: 2\n", "line 2"),
        ("a: 1\t# one\n", "line 1: .* .write spaces instead of the tab"),
        ("a: *nowhere\n", "line 1: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "holds several YAML documents"),
        ("", "c is empty"),
        ("# only a comment\n", "c is empty"),
        ("just text\n", "one value and no keys"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_used_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        parse(text)
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"a": 1,\n "b": }', "line 2"), ("", "line 1"), ("5", "one value and no keys"), ("{'a': 1}", "line 1")],
)
def test_json_that_cannot_be_used_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        parse(text, format="json")
    assert "\n" not in error.value.message


def test_json_positions() -> None:
    text = '\ufeff{"a":1,\t"b" : {"c":[true , null,\n"x\\u00e9"], "a": -2.5e-3}, "a": 3}'
    document = parse(text, format="json")
    assert {key: (characters(document, key), scalar.value) for key, scalar in document.scalars.items()} == {
        "a": ("3", 3),
        "b.c.0": ("true", True),
        "b.c.1": ("null", None),
        "b.c.2": ('"x\\u00e9"', "xé"),
        "b.a": ("-2.5e-3", -2.5e-3),
    }
    assert document.scalars["a"].num_ignored == 1
    assert document.scalars["b.c.2"].line == 2


keys = st.text(alphabet=st.characters(exclude_characters="."), max_size=4)
documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys.filter(bool), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(keys.filter(bool), documents, max_size=4), st.sampled_from([None, 1, "\t"]), st.booleans()
)
def test_every_json_value_is_found_at_its_characters(data: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only)
    document = parse(text, format="json")

    def leaves(value: Any, key: str) -> dict[str, Any]:
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = {str(i): item for i, item in enumerate(value)}.items()
        else:
            return {key: value}
        return {
            k: v for name, item in items for k, v in leaves(item, f"{key}.{name}" if key else name).items()
        }

    assert {key: scalar.value for key, scalar in document.scalars.items()} == leaves(data, "")
    for key, scalar in document.scalars.items():
        assert json.loads(characters(document, key)) == scalar.value


def test_a_missing_key_names_the_nearest() -> None:
    document = parse("data_loader: {batch_size: 4, num_workers: 2}\nmodel: {lora: {r: 8}}\n")
    with pytest.raises(BadInput) as error:
        document.find("data.batch_size")
    assert error.value.message == "c has no key data.batch_size"
    assert error.value.hint is not None and error.value.hint.startswith("nearest: data_loader.batch_size")
    with pytest.raises(BadInput, match=r"model.lora in c is a mapping, not a value .*model.lora.r"):
        document.find("model.lora")


def test_the_hint_of_a_config_without_values() -> None:
    assert nearest_hint("batch_size", []) == "it holds no values at all"
    assert nearest_hint("zzz", ["alpha", "beta"]) == "it holds alpha, beta"


def test_a_file_is_read_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "a.yml").write_bytes(b"a: 1\r\nb: 2")
    assert read_document(tmp_path / "a.json").format == "json"
    assert read_document(tmp_path / "a.yml").text == "a: 1\r\nb: 2"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config at"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(BadInput, match="is a folder"):
        read_document(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(BadInput, match="is not UTF-8 text: byte 3 is 0xe9"):
        read_document(tmp_path / "latin.yaml")
    (tmp_path / "deep.yaml").write_text(f"a: {'[' * 5000}{']' * 5000}\n")
    with pytest.raises(BadInput, match="nested too deeply"):
        read_document(tmp_path / "deep.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # reading it would wait for a writer
    with pytest.raises(BadInput, match="a pipe or a device"):
        read_document(tmp_path / "pipe.yaml")


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
        "training.learning_rate is given 2 times in c; the last one (line 12) counts and is changed"
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
    assert edited.warnings == (("the comment beside a (c:1) mentions 16",) if speaks else ())


def test_several_documents_and_toml_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: 1\n---\na: 2\n")
    with pytest.raises(BadInput, match=r"holds several YAML documents \(the second starts at line 2\)"):
        read_document(path)
    path.write_text("# one\n---\na: 1\n")
    assert read_document(path).find("a").value == 1
    toml = tmp_path / "c.toml"
    toml.write_text("a = 1\n")
    with pytest.raises(BadInput, match="is TOML, which a plan cannot write back"):
        read_document(toml)
