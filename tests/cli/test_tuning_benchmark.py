"""The benchmark of the tuner: its items say when they were measured, and the tables of the docs repeat it."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def load_module(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("docs", "benchmarks/diagnosis", "benchmarks", "benchmarks/tuning"):
        monkeypatch.syspath_prepend(str(repository / folder))

    def load(name: str) -> Any:
        for each in (name, "proofs", "planted"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        return importlib.import_module(name)

    return load


def test_an_item_is_kept_with_its_day_and_revision_and_not_run_again(
    load_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the module of the planted scripts would set
    run = load_module("run")
    acts: list[int] = []

    def act() -> dict[str, Any]:
        acts.append(1)
        return {"right": True}

    for _ in range(2):
        done = run.run({"traps": {"one": act}}, only=[], state=tmp_path / "state", quick=False)
    item = done["traps"]["one"]
    assert len(acts) == 1 and item["right"] and item["took_s"] >= 0
    assert item["date"] == datetime.date.today().isoformat() and item["load_1min"] >= 0
    assert item.keys() >= {"revision"}


def test_a_table_says_when_each_part_was_measured(load_module: Any, tmp_path: Path, repository: Path) -> None:
    figures = load_module("tuning_figures")
    page = (repository / "docs" / "tune.md").read_text(encoding="utf-8")
    assert figures.with_tables(page, folder=tmp_path).count(figures.NOT_MEASURED) == 2
    row = {"items": 1, "right": 1, "met": True}
    known = {"hardware": "a CPU", "torch": "2.13"}
    old: dict[str, Any] = {
        "rows": {"traps": row, "decoys": row},
        "items": {"traps": {"x": {}}, "decoys": {"x": {}}},
    }
    stamps = [{"date": "2026-11-19", "load_1min": 4.2}, {"date": "2026-11-20", "load_1min": 30.0}]
    new: dict[str, Any] = {"rows": {"traps": row}, "items": {"traps": dict(enumerate(stamps))}}
    gain = {"tuned": 4.0, "low": 3.5, "high": 4.5, "by_hand": 5.0, "by_hand_low": 4.9, "by_hand_high": 5.1}
    planted = {**gain, "share": 0.8, "kept": []}
    old["items"]["planted"] = {"first": planted, "second": planted}
    new["items"]["planted"] = {
        "second": {**planted, "share": 1.0, "kept": ["threads 1"], "date": "2026-11-20"}
    }
    for date, result in (("2026-11-18", old), ("2026-11-20", new)):
        (tmp_path / f"tuning_a-cpu_{date}.json").write_text(json.dumps({**known, **result}))
    shown = figures.with_tables(page, folder=tmp_path)
    assert "| traps | 1 | 1 right |  | all refused | 2026-11-19 to 2026-11-20, load 4 to 30 |" in shown
    assert "| nothing kept | 2026-11-18 |" in shown
    assert "| 0.80 (missed) | nothing kept | 2026-11-18 |" in shown  # the new run has not measured it
    assert "| 1.00 | threads 1 | 2026-11-20 |" in shown and shown.count("`second`") == 1
