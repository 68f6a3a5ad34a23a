"""The steering benchmark runs every arm, its page shows what was measured, and the example holds."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the benchmark's models are transformers models")

from flatout.engines.steering.questions import read_questions
from flatout.engines.steering.report.record import load_record
from tests.support.warm_python import warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "steering"
SMALL = ["--texts", "6", "--longest", "8", "--rows", "3", "--prompt", "4", "--new", "3", "--trials", "66"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    flags = ["--models", "tiny", "--questions", "2", "--seconds", "0", "--device", "cpu", *SMALL]
    done = warm().run("python", ROOT / "benchmarks" / "steering" / "run.py", *flags, "--save", folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("steering-tiny_*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["folder"] = folder
    return found


def test_every_arm_runs(result: dict[str, Any]) -> None:
    sections = {one["section"]: one["rows"] for one in result["sections"]}
    assert {name: len(rows) for name, rows in sections.items()} == {
        "extraction": 8, "store": 4, "steered": 3, "choices": 3, "trials": 5, "search": 4,
    }  # fmt: skip
    failed = [row for rows in sections.values() for row in rows if "failed" in row]
    assert failed == []


def test_the_page_shows_what_the_result_files_say(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("steering_figures")
    page = (ROOT / "docs" / "steering.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- steering: (\w+) -->", page) == ["speed", "peers"]
    assert figures.with_tables(page, folder=tmp_path).count("Not measured yet") == 2
    shown = figures.speed(result["folder"])
    assert shown.count("\n") == 1 + len(figures.LINES), "a line of the table names an arm that is not there"
    (steered,) = (
        row["of unsteered"]["ratio"]
        for one in result["sections"]
        for row in one["rows"]
        if row["arm"] == "steered, one configuration"
    )
    assert f"| steered tokens/s, of unsteered | 0.97 | {steered:.3f}" in shown


def test_a_later_run_of_some_sections_replaces_only_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("steering_figures")
    sections = {
        ("SmolLM2-135M-Instruct", "2026-01-01"): {"store": 1, "trials": 2},
        ("smollm2", "2026-01-02"): {"store": 4, "trials": 3},
        ("smollm2", "2026-01-03"): {"trials": 4},
        ("smollm2", "2026-01-03-2"): {"trials": 5},
    }
    names = {"store": ("read", "times as fast as computing"), "trials": ("packed", "trials per hour")}
    for (model, date), numbers in sections.items():
        rows = [
            {"model": model, "section": part, "rows": [{"arm": names[part][0], names[part][1]: number}]}
            for part, number in numbers.items()
        ]
        found = {"hardware": "gpu", "date": date[:10], "sections": rows}
        (tmp_path / f"steering-{model}_gpu_{date}.json").write_text(json.dumps(found), encoding="utf-8")
    heading, _, *lines = figures.speed(tmp_path).splitlines()
    assert heading == "| | goal | SmolLM2-135M-Instruct, gpu |"
    assert [line.rsplit("|", 2)[1].strip() for line in lines] == ["4", "5"]


@pytest.mark.parametrize("name", ["corrigible", "not-corrigible"])
def test_the_example_moved_the_model_and_the_readme_says_by_how_much(name: str) -> None:
    record = load_record(EXAMPLE / name / "result.json")
    assert record.retest is not None
    difference = record.retest.difference
    assert difference.low > 0
    for page in (EXAMPLE / "README.md", ROOT / "docs" / "steering.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{difference.value:.3f} ({difference.low:.3f} to {difference.high:.3f})" in text


def test_questions_in_words(tmp_path: Path) -> None:
    asked = [
        {
            "question": f"Is {number} a number?\n\nChoices:\n (A) Yes, it is\n (B) No (never)",
            "answer_matching_behavior": "(B)",
            "answer_not_matching_behavior": "(A)",
        }
        for number in range(20)
    ]
    source, found = tmp_path / "asked.json", {}
    source.write_text(json.dumps(asked), encoding="utf-8")
    for half in ("first", "second"):
        out = tmp_path / f"{half}.jsonl"
        warm().run("python", EXAMPLE / "in_words.py", source, "--half", half, "--out", out, check=True)
        found[half] = read_questions(out)
    questions = [*found["first"], *found["second"]]
    assert {one.prompt for one in questions} == {f"Is {number} a number?" for number in range(20)}
    assert {(one.positive, one.negative) for one in questions} == {("No (never)", "Yes, it is")}
    assert found["first"]
    assert found["second"]
