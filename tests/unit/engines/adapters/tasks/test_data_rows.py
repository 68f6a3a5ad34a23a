"""Rows: bad lines are named, splits depend on inputs alone, no input is in two splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks import data_rows
from flatout.engines.adapters.tasks.data_rows import DataOptions, Splits
from flatout.engines.adapters.tasks.known import known_tasks, task_named
from flatout.engines.run.row_files import read_rows
from flatout.ground.errors import BadInput


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts_of(path: Path) -> list[str]:
    return read_rows(path, read=lambda row: data_rows.text_field(row, "text", "sentence"))


def test_empty_lines_do_not_count_and_other_names_are_read(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", '{"text": "one"}', "", '{"sentence": "two"}', '{"text": ["th", "ree"]}', " "
    )
    assert texts_of(path) == ["one", "two", "th ree"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', r"a\.jsonl:2 is not JSON"),
        ("[1]", r"a\.jsonl:2 is a list"),
        ('{"txt": "x"}', r"a\.jsonl:2: 'text' is missing \(a line has: text or sentence\)"),
        ('{"text": 3}', r"a\.jsonl:2: 'text' is 3, not a text"),
        ('{"text": "  "}', r"a\.jsonl:2: 'text' is '  ', not a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        texts_of(write_lines(tmp_path / "a.jsonl", '{"text": "one"}', line))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        texts_of(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="is empty"):
        texts_of(write_lines(tmp_path / "a.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BadInput, match="cannot be read"):
        texts_of(tmp_path / "b.jsonl")


def test_the_files_of_a_folder_by_their_split(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        write_lines(tmp_path / f"{name}.jsonl", "{}")
    assert {split: path.name for split, path in data_rows.split_files(tmp_path).items()} == {
        "train": "train.jsonl",
        "validation": "dev.jsonl",
        "test": "test.jsonl",
    }
    (tmp_path / "test.jsonl").rename(tmp_path / "test.csv")
    assert data_rows.split_files(tmp_path)["test"].name == "test.csv"
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(BadInput, match=r"holds no train\.jsonl"):
        data_rows.split_files(tmp_path)


@given(st.text(max_size=20))
def test_case_and_spaces_do_not_move_a_row(key: str) -> None:
    assert 0 <= data_rows.share_of(key) < 1
    assert data_rows.split_of(key) == data_rows.split_of(f"  {key.lower()} ")


def test_splits_have_their_shares() -> None:
    found = [data_rows.split_of(f"row {number}") for number in range(4000)]
    assert 0.07 < found.count("test") / 4000 < 0.13
    assert 0.07 < found.count("validation") / 4000 < 0.13


def test_the_first_of_each_is_kept_and_taken() -> None:
    taken: set[str] = set()
    same: Any = str
    assert data_rows.drop_repeats(["A b", "a  B", "c"], key=same, taken=taken) == ["A b", "c"]
    assert data_rows.drop_repeats(["C", "d"], key=same, taken=taken) == ["d"]


def test_some_of_the_rows_are_the_same_ones_in_their_order() -> None:
    names = [f"row {number}" for number in range(50)]
    few, more = data_rows.choose_some(names, 10, key=str), data_rows.choose_some(names, 20, key=str)
    assert len(few) == 10 and few == sorted(few, key=names.index) and set(few) <= set(more)
    assert data_rows.choose_some(names, None, key=str) == data_rows.choose_some(names, 99, key=str) == names
    assert data_rows.choose_some(names[::-1], 10, key=str) == few[::-1]


def test_options_as_a_settings_file_gives_them() -> None:
    options = DataOptions.of({"path": "~/rows", "num_train": 5}, task="qa")
    assert options.path == Path("~/rows").expanduser() and options.num_train == 5
    for written, said in (
        ({"pth": "x"}, "did you mean path"),
        ({"path": 3}, "path=3 is not a path"),
        ({"source": "web"}, "source='web'.*known: auto, generated"),
        ({"num_test": 0}, "num_test=0 is not a number of rows"),
        ({"num_test": "9"}, "num_test='9' is not a number of rows"),
        ({"test": "x.jsonl"}, "need a path to train on"),
    ):
        with pytest.raises(BadInput, match=said):
            DataOptions.of(written, task="qa")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(*numbers: int) -> list[dict[str, Any]]:
    return [{"source": f"Text {number}", "target": f"wort {number}"} for number in numbers]


def sources(splits: Splits) -> dict[str, set[str]]:
    return {
        split: {record["source"].lower() for record in getattr(splits, split)}
        for split in ("train", "validation", "test")
    }


def test_one_file_is_divided_by_its_inputs(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(*range(200)), *pairs(*range(50))])
    splits = task_named("translation").records(DataOptions(path=path))
    parts = sources(splits)
    assert sum(len(part) for part in parts.values()) == 200 and len(splits.train) == len(parts["train"])
    assert all(parts.values()) and len(parts["train"]) > 120
    backwards = write(tmp_path / "other.jsonl", pairs(*reversed(range(200))))
    assert sources(task_named("translation").records(DataOptions(path=backwards))) == parts
    assert splits.origin == str(path)


def test_a_folder_of_splits_and_an_input_that_is_in_several(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", pairs(1, 2, 3, 4))
    write(tmp_path / "dev.jsonl", [{"source": "text  2", "target": "x"}, *pairs(5)])
    write(tmp_path / "test.jsonl", pairs(3, 5, 6))
    splits = task_named("translation").records(DataOptions(path=tmp_path))
    assert sources(splits) == {
        "train": {"text 1", "text 4"},
        "validation": {"text  2"},
        "test": {"text 3", "text 5", "text 6"},
    }


def test_files_named_one_by_one_and_numbers(tmp_path: Path) -> None:
    options = DataOptions(
        path=write(tmp_path / "a.jsonl", pairs(*range(100))),
        test=write(tmp_path / "b.jsonl", pairs(*range(100, 120))),
        num_train=10,
        num_test=5,
    )
    splits = task_named("translation").records(options)
    assert len(splits.train) == 10 and len(splits.test) == 5 and splits.validation
    assert all(int(record["source"].split()[1]) >= 100 for record in splits.test)


def test_questions_on_one_text_stay_in_one_split(tmp_path: Path) -> None:
    rows = [
        {"context": f"The number is {number}.", "question": f"Which, {asked}?", "answer": str(number)}
        for number in range(40)
        for asked in ("Ada", "Ben", "Cleo")
    ]
    splits = task_named("qa").records(DataOptions(path=write(tmp_path / "qa.jsonl", rows)))
    contexts = [
        {record["context"] for record in part} for part in (splits.train, splits.validation, splits.test)
    ]
    assert sum(len(part) for part in contexts) == 40
    assert len(splits.train) == 3 * len(contexts[0])


def test_too_few_rows_are_an_error_and_not_an_empty_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(1, 2))
    with pytest.raises(BadInput, match="translation: no rows for "):
        task_named("translation").records(DataOptions(path=path))


@pytest.mark.parametrize("name", sorted(known_tasks()))
def test_generated_splits_are_apart_and_as_large_as_asked(name: str) -> None:
    task = task_named(name)
    splits = task.records(DataOptions(source="generated", num_train=300, seed=2))
    inputs = [
        task.input_of(record) for part in (splits.train, splits.validation, splits.test) for record in part
    ]
    assert len(splits.train) == 300 and len(splits.validation) == len(splits.test) == 200
    assert len(set(inputs)) == 700
    assert splits.origin == "generated (as asked)"
    assert task.records(DataOptions(source="generated", num_train=300, seed=2)) == splits


def test_without_a_network_real_rows_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BadInput, match=r"real rows cannot be fetched: pip could not fetch jupyterlab.*path"):
        task_named("translation").records(DataOptions(num_train=10))


@pytest.mark.parametrize("name", ["sentiment", "classification", "regression"])
def test_rows_are_not_made_up_unasked(name: str) -> None:
    with pytest.raises(BadInput, match=rf"{name}: no rows are given.*path: FILE.*source: generated"):
        task_named(name).records(DataOptions(num_train=10))
