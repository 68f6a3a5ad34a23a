"""Every line is read, or named with what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.engines.run.row_files import first_row, read_rows
from flatout.ground.errors import BadInput


def questions(path: Path) -> list[Any]:
    def read(row: Any) -> Any:
        if row["q"] == "bad":
            raise BadInput("q is bad")
        return row["q"]

    return read_rows(path, read=read, hint='lines of {"q": "..."}')


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty.jsonl", tmp_path / "foreign.jsonl"
    empty.write_text("\n \n")
    foreign.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (empty, "is empty"),
        (foreign, "UTF-8"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(BadInput, match=message):
            questions(path)


def test_lines_end_at_line_ends_only(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes('\ufeff{"q": "one\u2028two"}\r\n{"q": "three"}'.encode())
    assert questions(path) == ["one\u2028two", "three"]


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "f.jsonl:3 is not JSON"), ("[1]", "f.jsonl:3 is a list"), ('{"q": "bad"}', "f.jsonl:3: q is bad")],
)
def test_a_bad_line_is_named_with_what_a_line_looks_like(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(f'{{"q": "x"}}\n\n{line}\n')
    with pytest.raises(BadInput, match=said) as caught:
        questions(path)
    assert 'lines of {"q": "..."}' in str(caught.value) and "\n" not in str(caught.value)


def test_half_of_a_character_is_refused_and_two_halves_are_one(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"q": "\\ud83d\\ude00"}\n')
    assert questions(path) == ["\U0001f600"]
    for row in (r'{"q": "a\ud83d"}', r'{"q": "x", "more": ["\ude00 z"]}', r'{"q": "x", "\udfff": 1}'):
        path.write_text(f'{{"q": "x"}}\n{row}\n')
        with pytest.raises(BadInput, match=r"f\.jsonl:2 has an unpaired surrogate: \\u[dD][0-9a-f]{3} "):
            questions(path)


def test_one_list_of_objects_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('[{"q": "one"},\n {"q": "two"}]')
    assert questions(path) == ["one", "two"]
    for text, said in (
        ('[{"q": "one"},\n {]', "f.json:2 is not JSON"),
        ('[{"q": "bad"}]', "f.json, item 1: q is"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=said):
            questions(path)


def test_a_table_is_rows_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_bytes('\ufeffq, more\r\n"one, ""1""\r\nline",2\r\n\r\nthree,\r\n'.encode())
    assert read_rows(path, read=dict) == [{"q": 'one, "1"\nline', "more": "2"}, {"q": "three", "more": ""}]
    assert first_row(path) == (f"{path}:2", {"q": 'one, "1"\nline', "more": "2"})
    path = tmp_path / "f.TSV"
    path.write_text("q\tmore\none, two\t3\n")
    assert questions(path) == ["one, two"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q,more\n", "f.csv is empty"),
        ("q,more\nx,1\n\nx\n", "f.csv:4 has 1 cells, and the table 2 columns"),
        ('q,more\n"x\ny",1\none, two,3\n', "f.csv:4 has 3 cells.*in quotes"),
        ("q,q\nx,1\n", "f.csv:1 names the columns 'q', 'q'"),
        ('q\nx\n"half\n', "f.csv:3 is not a row of a table"),
        ("q\nbad\n", "f.csv:2: q is bad"),
    ],
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        questions(path)
