"""Where rows come from, in which order, and that no input is in two splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.tasks import DataOptions, Splits, known_tasks, task_named
from flatout.errors import BadInput


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


def test_without_a_network_rows_are_generated_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    splits = task_named("translation").records(DataOptions(num_train=10))
    assert splits.origin.startswith("generated (real rows are out of reach: pip could not fetch jupyterlab")
    assert len(splits.train) == 10


def test_a_task_without_real_rows_says_so() -> None:
    splits = task_named("sentiment").records(DataOptions(num_train=10))
    assert splits.origin == "generated (no package with real rows is known; give a path for yours)"
