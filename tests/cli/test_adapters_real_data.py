"""The script that gathers real rows: the same files on every machine, nothing in two splits."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.kinds.translation import PACKAGES
from flatout.engines.adapters.tasks.known import known_tasks, task_named
from flatout.ground import packages
from tests.support.warm_python import warm

SCRIPT = Path(__file__).parents[2] / "examples" / "adapters" / "real_data.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("real_data_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def small_folder(folder: Path) -> Path:
    """A few rows of each set, in the forms that their publishers give them."""
    generated = {name: task_named(name).generated(60, seed=0) for name in known_tasks()}
    lines(folder / "squad" / "train.jsonl", [{"id": "x", **row} for row in generated["qa"]])
    documents = [
        {"source": row["document"].split(". "), "target": [row["summary"], "another one"], "title": "x"}
        for row in generated["summarisation"]
    ]
    lines(folder / "scitldr" / "train.jsonl", documents[:40])
    lines(folder / "scitldr" / "test.jsonl", documents[40:])
    code = [{"text": row["docstring"], "code": row["code"], "task_id": 1} for row in generated["code"]]
    lines(folder / "mbpp" / "mbpp.jsonl", code)
    (folder / "sentiment").mkdir()
    with zipfile.ZipFile(folder / "sentiment" / "sentence_polarity.zip", "w") as archive:
        for suffix, label in (("neg", "negative"), ("pos", "positive")):
            texts = [row["text"] for row in generated["sentiment"] if row["label"] == label]
            archive.writestr(f"set/rt.{suffix}", "\n".join(texts))
    return folder


def test_groups_stay_together_and_shares_are_kept(example: Any) -> None:
    task = task_named("qa")
    rows = [
        {"context": f"Number {number} is here.", "question": f"{who}?", "answer": f"{number}", "start": 7}
        for number in range(100)
        for who in ("Who", "Why", "WHO")
    ]
    splits = example.divided(task, rows)
    contexts = {split: {row["context"] for row in part} for split, part in splits.items()}
    assert sum(len(part) for part in splits.values()) == 200
    assert sum(len(part) for part in contexts.values()) == 100
    assert 40 <= len(splits["test"]) <= 42 and 20 <= len(splits["validation"]) <= 22
    assert example.divided(task, rows[::-1]).keys() == splits.keys()
    backwards = example.divided(task, rows[::-1])
    assert {split: {row["context"] for row in part} for split, part in backwards.items()} == contexts


def test_a_folder_becomes_files_that_the_tasks_read(example: Any, tmp_path: Path) -> None:
    data = small_folder(tmp_path / "data")
    for name, records in example.gathered(data, real=False):
        splits = example.divided(task_named(name), records)
        example.write(tmp_path / "out" / name, splits)
        read = task_named(name).records(DataOptions(path=tmp_path / "out" / name))
        assert len(read.train) == len(splits["train"]) > 30 and len(read.test) == len(splits["test"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "code",
        "qa",
        "sentiment",
        "summarisation",
    ]
    (first, *_) = (tmp_path / "out" / "summarisation" / "train.jsonl").read_text().splitlines()
    assert json.loads(first)["references"][1] == "another one"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = warm().run("python", SCRIPT, tmp_path / "none", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "sentence_polarity.zip does not exist" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_real_rows_are_added(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATOUT_CACHE")
    if not all(packages.folder_of(package).is_dir() for package in PACKAGES):
        pytest.skip("the German catalogues are not in the user's cache, and tests fetch nothing")
    found = dict(example.gathered(small_folder(tmp_path / "data")))
    assert set(found) == set(known_tasks())
    assert len(found["code"]) > 2000 and len(found["translation"]) > 1500 and len(found["qa"]) == 60
