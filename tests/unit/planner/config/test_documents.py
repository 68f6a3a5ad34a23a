from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import BadInput
from flatout.planner.config.documents import (
    Document,
    Format,
    nearest_hint,
    parse_document,
    plain_value,
    read_document,
)


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
        ("a: [1\nb: 2\n", "c is not YAML that can be read: line 2"),
        ("a: 1\n  b: 2\n", "line 2"),
        ("a: 1\t# one\n", "line 1: .* .write spaces instead of the tab"),
        ("a: *nowhere\n", "line 1: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "found another document|expected a single document"),
        ("", "c is empty"),
        ("# only a comment\n", "c is empty"),
        ("just text\n", "one value and no keys"),
        ("a: \x00\n", "not YAML that can be read"),
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
