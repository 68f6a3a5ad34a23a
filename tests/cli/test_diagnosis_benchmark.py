"""The benchmark of diagnosis: its fixes fit the planted scripts, its goals can be missed, its pages fill."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.rule import all_rules
from flatout.measure.evidence import Place

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "diagnosis"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the benchmark and of the docs, which are scripts and not packages."""
    names = (
        *("fixes", "reports", "score", "table", "turns", "twins", "aa", "run", "peers", "scoreboard"),
        "diagnosis_figures",
    )
    for folder in (BENCHMARK, ROOT / "docs", ROOT / "tests" / "planted"):
        monkeypatch.syspath_prepend(str(folder))

    def load_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load_module
    for name in names:
        sys.modules.pop(name, None)


def test_every_planted_script_can_be_mended(load: Any) -> None:
    fixes = load("fixes")
    planted = sorted(path.parent.name for path in fixes.PLANTED.glob("*/planted.py"))
    assert len(planted) > 15
    for rule in planted:
        text = fixes.mended(rule, workers=3)
        compile(text, f"{rule}.py", "exec")
        assert text != (fixes.PLANTED / rule / "planted.py").read_text()
        assert "# guilty" not in text
        assert ("num_workers=3" in text) == fixes.needs_workers(rule)


def test_every_rebuilt_report_marks_one_rule_and_can_be_mended(load: Any) -> None:
    reports, score = load("reports"), load("score")
    scripts = {path.stem: path.read_text() for path in (BENCHMARK / "reports").glob("*.py")}
    assert set(scripts) == set(reports.REPORTS)
    known = {rule.name for rule in all_rules()}
    for name, text in scripts.items():
        assert "args.mended" in text
        (mark,) = (mark for mark in score.marks(text, rule=name) if mark.required)
        assert mark.rules[0] in known


def test_the_finding_of_a_rebuilt_report_is_its_rules_best(load: Any) -> None:
    reports, score = load("reports"), load("score")
    mark = score.Mark(line=7, rules=("sync-in-step",), required=True, device=None)

    def said(name: str, line: int, speedup: float) -> Finding:
        return Finding(
            code="FO000",
            name=name,
            place=Place(file="train.py", line=line),
            message="",
            evidence=(),
            share=None,
            ceiling=Ceiling(step_s=1.0, speedup=speedup, kind="reads-free"),
            fix="",
            safety="exact",
        )

    others = [said("loader-bound", 7, 3.0), said("sync-in-step", 5, 2.0)]
    assert reports.found_at(mark, others)["found"] == 5
    assert reports.found_at(mark, others[:1])["as"] == "loader-bound"
    assert reports.found_at(mark, [said("loader-bound", 8, 3.0)])["found"] is None
    found = reports.found_at(mark, [*others, said("sync-in-step", 7, 1.5), said("sync-in-step", 9, 1.2)])
    assert (found["found"], found["rank"], found["ceiling"]) == (7, 3, 1.5)


def test_darkroom_is_mended_by_one_gather(load: Any, tmp_path: Path) -> None:
    fixes = load("fixes")
    script = fixes.darkroom_with_one_gather(tmp_path)
    assert script.name == "train.py"
    model = (tmp_path / "model.py").read_text()
    compile(model, "model.py", "exec")
    assert "table.gather" in model
    assert "seq.append" not in model


def test_a_script_that_ends_before_its_last_turn_begins_again(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("turns")
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    answers = io.StringIO()
    turns = module.Turns(answers, io.StringIO("go 4\ngo 2\n"))
    for number in range(6):
        if number == 2:
            turns.script_end()
            for _ in range(50):
                next(clock)  # it is set up anew
        turns.step_end()
    ready, answer = answers.getvalue().splitlines()
    assert ready == "ready"
    found = json.loads(answer)
    assert found["steps"] == len(found["each_s"]) > 1
    assert found["seconds"] < 10  # without the time between its end and its next step


def row(
    name: str, *, real: float, ceiling: float | None, arm: str = "knock-out", spread: float = 0.01
) -> Any:
    ends = {"low": None, "high": None}
    if ceiling is not None:
        ends = {"low": ceiling * (1 - spread), "high": ceiling * (1 + spread)}
    known = {"real": real, "real_low": real * (1 - spread), "real_high": real * (1 + spread)}
    return {"name": name, "ceiling": ceiling, "arm": arm, "of": "step", "found": True, **known, **ends}


def test_goals_name_the_rows_that_miss_them(load: Any) -> None:
    rows = [
        row("kept", real=2.0, ceiling=2.2),
        row("too-low", real=3.0, ceiling=2.0),
        row("too-high", real=2.0, ceiling=6.0),
        row("noisy", real=2.0, ceiling=6.0, spread=0.5),
        row("treated", real=2.0, ceiling=2.4, arm="autocast"),
        row("unproven", real=2.0, ceiling=None),
    ]
    kept = load("table").goals(rows)
    assert kept["real_above_ceiling"] == ["too-low"]
    assert kept["real_far_below_ceiling"] == ["too-high", "noisy?"]
    assert kept["treatments_off"] == ["treated"]
    assert kept["without_ceiling"] == ["unproven"]


def test_the_page_shows_ceilings_beside_gains(load: Any, tmp_path: Path) -> None:
    rows = [row("sync-in-step", real=1.14, ceiling=1.2, arm="reads-free"), row("x", real=2.0, ceiling=None)]
    result = {
        "hardware": "NVIDIA H200",
        "device": "h200",
        "rows": rows,
        "goals": load("table").goals(rows),
        "score": {"precision": "100.0%  (2 of 2)"},
    }
    chance = {"hardware": "NVIDIA H200", **load("aa").sums([[1.0, 0.9, 1.1]] * 97 + [[1.2, 1.1, 1.3]] * 3)}
    (tmp_path / "chance_nvidia-h200_2030-01-01.json").write_text(json.dumps(chance))
    (tmp_path / "diagnosis-nvidia-h200_2030-01-01.json").write_text(json.dumps(result))
    (tmp_path / "shares_h200.json").write_text(json.dumps({"ceilings": {"sync-in-step": 1.21}}))
    page = (ROOT / "docs" / "ceilings.md").read_text()
    assert len(re.findall(r"<!-- diagnosis: \w+ -->", page)) >= 3
    figures = load("diagnosis_figures")
    shown = figures.with_tables(page, folder=tmp_path)
    assert "| sync-in-step | 1.14× [1.13, 1.15] | 1.20× [1.19, 1.21] | reads-free | 1.21× |" in shown
    assert "97 of 100 intervals hold 1" in shown
    assert "Not measured yet" in figures.with_tables(page, folder=tmp_path / "none")


def test_traceml_gets_every_script_with_its_steps_marked(load: Any) -> None:
    peers, planted = load("peers"), load("fixes").PLANTED
    scripts = [path for path in planted.glob("*/*.py") if path.parent != planted]
    assert len(scripts) > 100
    for script in scripts:
        text = peers.with_traced_steps(script.read_text())
        compile(text, script.name, "exec")
        assert text.count("with traceml.trace_step(") == 1, script
        assert text.index("TRACED = []") < text.index("TRACED.append"), script
        assert ("wrap_dataloader_fetch" in text) == ("DataLoader(" not in script.read_text())


@pytest.fixture
def loader_case(load: Any, tmp_path: Path) -> Any:
    script = tmp_path / "loader_bound" / "planted.py"
    script.parent.mkdir()
    script.write_text("loader = 1  # guilty\nx = 2  # guilty: sync-in-step on cuda\n")
    return load("scoreboard").score.Case(rule="loader_bound", script=script)


@pytest.mark.parametrize(
    ("said", "exact", "inexact", "missed", "wrong"),
    [
        ([("SynchronizedDataLoaderPattern", 1)], 1, 0, 0, 0),
        ([("SynchronizedDataLoaderPattern", 7)], 0, 1, 0, 0),
        ([("OptimizerSingleTensorPattern", 1)], 0, 0, 1, 1),
        ([("OptimizerSingleTensorPattern", 1), ("SynchronizedDataLoaderPattern", None)], 0, 1, 0, 1),
        ([], 0, 0, 1, 0),
    ],
)
def test_a_pattern_is_judged_by_its_category_and_its_line(
    load: Any, loader_case: Any, said: Any, exact: int, inexact: int, missed: int, wrong: int
) -> None:
    board, peers = load("scoreboard"), load("peers")
    judged = board.judge_peer(loader_case, said, device="cpu", meanings=peers.PATTERNS)
    assert judged.expected == 1
    assert (judged.exact, len(judged.inexact), len(judged.missed), len(judged.wrong)) == (
        exact,
        inexact,
        missed,
        wrong,
    )


def test_a_state_of_a_job_is_never_wrong_and_the_first_word_is_ranked(load: Any, loader_case: Any) -> None:
    board, peers = load("scoreboard"), load("peers")

    def judge(*kinds: str) -> Any:
        said = [(kind, None) for kind in kinds]
        return board.judge_peer(loader_case, said, device="cpu", meanings=peers.TRACEML)

    assert judge("INPUT_BOUND", "HIGH_CPU").first is None
    assert judge("INPUT_BOUND", "HIGH_CPU").wrong == ()
    assert judge("COMPUTE_BOUND", "INPUT_BOUND").first is not None
    assert judge("H2D_BOUND").wrong == ("H2D_BOUND",)


def test_peers_are_asked_once_and_again_when_the_script_changed(
    load: Any, loader_case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = load("scoreboard")
    asked: list[Path] = []

    def ask(script: Path) -> Any:
        asked.append(script)
        if len(asked) > 1:
            raise board.CannotRun("broken")
        return [("INPUT_BOUND", None)]

    monkeypatch.setattr(board, "PLANTED", tmp_path)
    monkeypatch.setattr(board, "peers", lambda: {"TraceML": ("1.0", ask), "Other": ("", "not installed")})
    state = tmp_path / "state"
    for _ in range(2):
        board.ask_peers([loader_case], state)
    (path,) = state.glob("peers_*.json")
    assert json.loads(path.read_text())["Other"]["cannot"] == "not installed"
    answers = json.loads(path.read_text())["TraceML"]["cases"]
    assert answers["loader_bound/planted"]["said"] == [["INPUT_BOUND", None]]
    assert len(asked) == 1
    loader_case.script.write_text(loader_case.script.read_text() + "y = 3\n")
    board.ask_peers([loader_case], state)
    answers = json.loads(path.read_text())["TraceML"]["cases"]
    assert answers["loader_bound/planted"]["error"] == "broken"
    assert len(asked) == 2


def test_peers_that_ran_later_join_the_saved_table_and_leave_the_rest(
    load: Any, loader_case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = load("scoreboard")
    monkeypatch.setattr(board, "PLANTED", tmp_path)
    others = [{"tool": "TraceML", "cannot": "not installed"}, {"tool": "torch.profiler patterns"}]
    there = {"device": "cpu", "tools": [{"tool": "Flatout"}, *others]}
    saved = tmp_path / "scoreboard-some-cpu_2030-01-01.json"
    saved.write_text(json.dumps({"scripts": 9, "peers": [there, {"device": "h200", "tools": []}]}))
    text = board._text_of("loader_bound/planted")
    cases = {
        "loader_bound/planted": {"text": text, "said": [["INPUT_BOUND", None]]},
        "loader_bound/clean": {"text": "of another day", "said": []},
    }
    peer = {"version": "0.5.0", "cases": cases}
    (tmp_path / "peers_cpu.json").write_text(json.dumps({"TraceML": peer}))
    board.add_peers(saved, tmp_path, [loader_case])
    result = json.loads(saved.read_text())
    (ours, traceml, patterns), untouched = (each["tools"] for each in result["peers"])
    assert (result["scripts"], ours, patterns, untouched) == (9, {"tool": "Flatout"}, others[1], [])
    assert (traceml["tool"], traceml["scripts"], traceml["cannot"]) == ("TraceML 0.5.0", 1, None)
    assert traceml["recall"] == "100.0%  (1 of 1)"


def test_a_gain_counts_while_its_scripts_are_the_same(load: Any, tmp_path: Path) -> None:
    run, fixes = load("run"), load("fixes")
    gain = {"gain": 2.0, "scripts": fixes.digest("sync_in_step")}
    path = tmp_path / "gains_cpu.json"
    path.write_text(
        json.dumps(
            {"sync_in_step": gain, "row_indexing_in_loop": gain, "gone": gain, "darkroom": {"gain": 3.0}}
        )
    )
    assert set(run.known_gains(path)) == {"sync_in_step", "darkroom"}


def test_the_scoreboard_is_judged_from_what_lies_there(
    load: Any, loader_case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case was recorded on a GPU, one failed here and one has yet to run."""
    board = load("scoreboard")
    clean = tmp_path / "loader_bound" / "clean.py"
    clean.write_text("loader = 1\n")
    on_gpu = dataclasses.replace(loader_case, recording=tmp_path / "planted_h200.json.gz")
    cases = [on_gpu, loader_case, dataclasses.replace(loader_case, script=clean)]
    found = board.judge_peer(
        on_gpu, [("L", 1), ("S", None)], device="cuda", meanings={"L": ("FO105",), "S": ("FO202",)}
    )
    monkeypatch.setattr(board, "RESULTS", tmp_path / "none")
    monkeypatch.setattr(board, "PLANTED", tmp_path)
    monkeypatch.setattr(board.score, "run", lambda case: found)
    monkeypatch.setattr(board, "load_evidence", lambda path: None)
    said = [SimpleNamespace(name=name, also=()) for name in ("loader-bound", "sync-in-step")]
    monkeypatch.setattr(board, "examine", lambda evidence: said)
    (tmp_path / "errors.json").write_text(json.dumps({"loader_bound/planted": "exit code 2"}))
    asked = {"text": board._text_of("loader_bound/planted"), "said": [["INPUT_BOUND", None]]}
    peer = {"version": "0.5.0", "cases": {"loader_bound/planted": asked}}
    (tmp_path / "peers_h200.json").write_text(json.dumps({"TraceML": peer}))
    result, _ceilings = board.scoreboard(cases, tmp_path)
    assert result["not_run"] == ["loader_bound/clean"]
    assert result["faults"]["loader_bound/planted live"] == [
        "missed loader-bound at line 1",
        "error exit code 2",
    ]
    loader, sync = result["rules"]
    assert (loader["right"], loader["found"], loader["exact"]) == ([1, 1], [1, 2], [1, 1])
    assert (sync["right"], sync["found"], sync["exact"]) == ([1, 1], [1, 1], [0, 1])
    ((ours, theirs),) = [there["tools"] for there in result["peers"]]
    assert theirs["recall"] == " 50.0%  (1 of 2)"
    assert theirs["exact line"] == "  0.0%  (0 of 1)"
    assert ours["exact line"] == " 50.0%  (1 of 2)"
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "scoreboard-some-cpu_2030-01-01.json").write_text(json.dumps(result))
    page = (ROOT / "docs" / "scoreboard.md").read_text()
    shown = load("diagnosis_figures").with_tables(page, folder=folder)
    assert "| TraceML 0.5.0 | 1 |" in shown
    assert "| FO105 loader-bound | 1 of 1 | 1 of 2 | 1 of 1 | 1 of 2 | 0 of 0 | 0 |" in shown
    assert "Not run: loader_bound/clean." in shown
    assert "- loader_bound/planted live: missed loader-bound at line 1; error exit code 2" in shown
    assert "Not measured yet" not in shown
