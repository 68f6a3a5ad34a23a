"""Files of rows: bad lines are named, splits depend on inputs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks import rows
from flatout.errors import BadInput


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts_of(path: Path) -> list[str]:
    return rows.read_rows(path, read=lambda row: rows.text_field(row, "text", "sentence"))


def test_empty_lines_do_not_count_and_other_names_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", '{"text": "one"}', "", '{"sentence": "two"}', '{"text": ["th", "ree"]}', " "
    )
    assert texts_of(path) == ["one", "two", "th ree"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', r"a\.jsonl:2 is no JSON"),
        ("[1]", r"a\.jsonl:2 is a list"),
        ('{"txt": "x"}', r"a\.jsonl:2: 'text' is missing \(a line has: text or sentence\)"),
        ('{"text": 3}', r"a\.jsonl:2: 'text' is 3, not a text"),
        ('{"text": "  "}', r"a\.jsonl:2: 'text' is '  ', not a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        texts_of(write(tmp_path / "a.jsonl", '{"text": "one"}', line))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        texts_of(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="is empty"):
        texts_of(write(tmp_path / "a.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match="cannot be read"):
        texts_of(tmp_path / "b.jsonl")


def test_the_files_of_a_folder_by_their_split(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        write(tmp_path / f"{name}.jsonl", "{}")
    assert {split: path.name for split, path in rows.split_files(tmp_path).items()} == {
        "train": "train.jsonl",
        "validation": "dev.jsonl",
        "test": "test.jsonl",
    }
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(BadInput, match=r"holds no train\.jsonl"):
        rows.split_files(tmp_path)


@given(st.text(max_size=20))
def test_case_and_spaces_do_not_move_a_row(key: str) -> None:
    assert 0 <= rows.share_of(key) < 1
    assert rows.split_of(key) == rows.split_of(f"  {key.lower()} ")


def test_splits_have_their_shares() -> None:
    found = [rows.split_of(f"row {number}") for number in range(4000)]
    assert 0.07 < found.count("test") / 4000 < 0.13
    assert 0.07 < found.count("validation") / 4000 < 0.13


def test_the_first_of_each_is_kept_and_taken() -> None:
    taken: set[str] = set()
    same: Any = str
    assert rows.distinct(["A b", "a  B", "c"], key=same, taken=taken) == ["A b", "c"]
    assert rows.distinct(["C", "d"], key=same, taken=taken) == ["d"]


def test_some_of_the_rows_are_the_same_ones_in_their_order() -> None:
    names = [f"row {number}" for number in range(50)]
    few, more = rows.some(names, 10, key=str), rows.some(names, 20, key=str)
    assert len(few) == 10 and few == sorted(few, key=names.index) and set(few) <= set(more)
    assert rows.some(names, None, key=str) == rows.some(names, 99, key=str) == names
    assert rows.some(names[::-1], 10, key=str) == few[::-1]
