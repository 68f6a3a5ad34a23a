"""`flatout diagnose`: what is checked before anything runs, what goes where, what it ends with."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flatout.cli.app import application
from flatout.cli.diagnose import exit_code, rules
from flatout.doctor.rule import SECTIONS, all_rules
from flatout.ground.errors import BadInput
from flatout.measure.evidence_file import save_evidence
from tests.support import doctor as builders


def diagnose(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["diagnose", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "evidence.json"
    save_evidence(builders.evidence(), path)
    return path


def test_saved_evidence_is_rendered_and_findings_end_with_one(saved: Path) -> None:
    answer = diagnose("--evidence", saved)
    assert answer.exit_code == 1
    assert "FO302 row-indexing-in-loop" in answer.stdout
    assert "darkroom/model.py:61" in answer.stdout
    assert answer.stderr == ""


def test_json_is_one_versioned_document(saved: Path) -> None:
    answer = diagnose("--evidence", saved, "--json")
    document = json.loads(answer.stdout)
    assert (document["format"], document["version"]) == ("flatout-diagnosis", 1)
    assert "FO302" in {finding["code"] for finding in document["findings"]}
    assert document["evidence"] == json.loads(saved.read_text())
    assert answer.exit_code == 1


def test_a_clean_job_ends_with_zero(tmp_path: Path) -> None:
    clean = builders.evidence(
        sites=(), loaders=(), kernels=None, memory=None, counterfactuals=(), module_calls=(), precision=None
    )
    path = tmp_path / "clean.json"
    save_evidence(clean, path)
    answer = diagnose("--evidence", path)
    assert answer.exit_code == 0
    assert "No findings" in answer.stdout


def test_the_page_is_written_whole_and_named(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "made" / "on" / "the" / "way" / "report.html"
    answer = diagnose("--evidence", saved, "--html", page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]
    assert f"flatout: wrote {page}\n" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to diagnose"),
        (("--evidence", "run.json", "train.py"), "train.py has no effect"),
        (("--evidence", "run.json", "--save", "x.json"), "--save has no effect"),
        (("--evidence", "run.json", "--keep-running"), "--keep-running has no effect"),
        (("--seconds", "0", "train.py"), "--seconds 0 is not a positive number"),
        (("--seconds", "nan", "train.py"), "--seconds nan is not a positive number"),
        (("--evidence", "no-such.json"), "no Evidence file at no-such.json"),
        (("no-such-script.py",), "no script at no-such-script.py"),
        (("-m", "no_such_module"), "there is no module 'no_such_module'"),
        (("--html", os.sep, "train.py"), f"--html {os.sep} is a folder"),
    ],
)
def test_bad_input_is_one_line_and_ends_with_two(arguments: tuple[str, ...], message: str) -> None:
    answer = diagnose(*arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("flatout: ")
    assert message in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_folder_is_not_a_script(tmp_path: Path) -> None:
    answer = diagnose(tmp_path)
    assert answer.exit_code == 2
    assert "is a folder" in answer.stderr


def test_damaged_evidence_is_one_line(saved: Path) -> None:
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    answer = diagnose("--evidence", saved)
    assert answer.exit_code == 2
    assert "not complete JSON" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_evidence_of_a_later_version_is_one_line(saved: Path) -> None:
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "version": 99}))
    answer = diagnose("--evidence", saved)
    assert answer.exit_code == 2
    assert "version 99" in answer.stderr


def test_the_page_is_checked_before_the_job_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('must not run')\n")
    (tmp_path / "file").write_text("")
    answer = diagnose("--html", tmp_path / "file" / "report.html", script)
    assert answer.exit_code == 2
    assert "cannot be written" in answer.stderr


def test_what_stands_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    """And its own output; an exit code before its first step is named, not taken for a result."""
    script = tmp_path / "ends.py"
    script.write_text("import sys\nprint('given', sys.argv[1:])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "flatout", "diagnose", "--save", str(tmp_path / "evidence.json")]
    theirs = ["--json", "-m", "--seconds", "x", "--", "--html"]
    done = subprocess.run(
        [*command, str(script), *theirs], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert f"given {theirs}" in done.stdout
    assert done.returncode == 2
    assert "ended with exit code 7 before any step was measured" in done.stderr


@pytest.mark.parametrize(
    ("own_code", "keep_running", "with_findings", "expected"),
    [
        (None, False, True, 1),
        (None, False, False, 0),
        (0, False, True, 1),
        (3, False, True, 3),
        (3, True, True, 3),
        (0, True, True, 0),
        (None, True, True, 1),
    ],
)
def test_exit_code(own_code: int | None, keep_running: bool, with_findings: bool, expected: int) -> None:
    made = builders.diagnosis(script_exit_code=own_code)
    made = made if with_findings else dataclasses.replace(made, findings=())
    assert exit_code(made, keep_running=keep_running) == expected


def test_a_report_that_saw_too_little_does_not_pass_for_a_clean_one() -> None:
    evidence = builders.cpu_evidence(
        counterfactuals=(), missing=("count: no time was left for this pass",), sites=(), module_calls=()
    )
    made = builders.diagnosis(findings=(), evidence=evidence)
    assert exit_code(made) == 2
    assert exit_code(made, launched=True) == 0
    assert exit_code(dataclasses.replace(made, findings=builders.findings())) == 1


# Rules


def run_rules(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(rules)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_the_table_has_every_rule() -> None:
    result = run_rules()
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    groups = [line for line in result.stdout.splitlines() if not line.startswith("  ")]
    assert groups[:2] == ["FO1xx loading", "FO2xx transfers, waits and the host"]
    assert len(groups) == len({rule.code[:3] for rule in all_rules()})
    for rule, line in zip(all_rules(), lines, strict=True):
        assert line.split()[:2] == [rule.code, rule.name]
        assert rule.summary.replace("`", "") in line


@pytest.mark.parametrize("asked", ["FO301", "fo301", "tensor-created-in-loop"])
def test_one_rule_is_explained(asked: str) -> None:
    result = run_rules(asked)
    assert result.exit_code == 0
    assert "FO301 tensor-created-in-loop" in result.stdout
    assert all(head in result.stdout for head in SECTIONS)
    assert "self.kind_embedding(kinds)" in result.stdout


def test_json_holds_the_same_rules() -> None:
    document = json.loads(run_rules("--json").stdout)
    assert (document["format"], document["version"]) == ("flatout-rules", 1)
    assert [entry["code"] for entry in document["rules"]] == [rule.code for rule in all_rules()]
    (entry,) = json.loads(run_rules("FO301", "--json").stdout)["rules"]
    assert tuple(entry["sections"]) == SECTIONS


def test_an_unknown_rule_is_the_users_error():
    result = run_rules("FO999")
    assert isinstance(result.exception, BadInput)
