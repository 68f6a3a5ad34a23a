"""The benchmark of native traces: how answers of a GPU are held against the committed tables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="the benchmark's models are built from transformers configurations"
)
pytest.importorskip("peft", reason="one family of the benchmark is adapters of PEFT")

from benchmarks.memory import native
from benchmarks.memory.configurations import SETS
from benchmarks.memory.first_look import OURS
from benchmarks.memory.run import compare
from benchmarks.memory.table import write_table

ROOT = Path(__file__).resolve().parents[2]


def test_native_estimates_are_held_against_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the committed tables; the answers stand for those of a GPU, one in ten of them a failure."""
    rows = native.rows_of(list(native.EAGER), only="")
    assert len(rows) >= 130 and {name for name, _, _ in rows} <= set(SETS)
    saved = {name: native.saved_answers(name) for name in SETS}  # none yet of a set that was measured last
    compared = []
    for number, (name, each, row) in enumerate(rows):
        made = {key: round(1.01 * row[f"peak_{key}_bytes"]) for key in ("allocated", "reserved")}
        answers = {
            native.NATIVE: made if number % 10 else {"error": "BadInput: no"},
            OURS: saved[name].get(each.label, {"error": "BadInput: no"}),
        }
        compared.append({"set": name, **compare(row, answers)})
    summary = native.summarize_all(compared)
    found = summary["all"]["allocated"]
    failed = len(rows[::10])
    assert (found[native.NATIVE]["count"], found[native.NATIVE]["failed"]) == (len(rows) - failed, failed)
    assert found[native.NATIVE]["median"] == pytest.approx(0.01, rel=1e-3)
    known = [
        "allocated" in saved[name].get(each.label, {})
        for number, (name, each, _) in enumerate(rows)
        if number % 10
    ]
    assert found[OURS]["count"] == sum(known) > 0.8 * len(known) and found[OURS]["median"] < 0.005
    native.show(summary)

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("memory_figures")
    assert "No native estimate has been held against" in figures.native(tmp_path)
    table = {
        "hardware": "a GPU",
        "date": "2026-01-01",
        "estimated_with": {"torch": "2.11"},
        "summary": summary,
    }
    write_table(tmp_path / "native_a-gpu_2026-01-01.json", {**table, "summary": summary, "rows": compared})
    shown = figures.native(tmp_path)
    assert re.search(rf"^\| all \| allocated \| natively \| \d+ \| {failed} \| 1.00 % ", shown, re.MULTILINE)
    assert "| measured | reserved | by rules |" in shown
