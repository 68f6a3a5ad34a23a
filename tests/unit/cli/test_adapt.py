"""The verb: files and flags become settings, progress goes to stderr, and what cannot be done is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flatout.cli.app import application
from tests.support.adapters import save_tiny, tiny_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    path = folder / "run.yaml"
    path.write_text(json.dumps(tiny_settings(model, folder / "run")))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    """A run of all phases, trained by the verb."""
    answer = adapt("train", config, "--phase", "all")
    assert answer.exit_code == 0, answer.stderr
    assert "phase1 6/6 | CPU " in answer.stderr and " | loss " in answer.stderr
    assert "phase3  step 4 of 4, finished" in answer.stdout
    assert "run.png" in answer.stdout
    return config.parent / "run"


def adapt(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(application(), ["adapt", *map(str, arguments)], input=text)


def document(*arguments: object) -> dict[str, Any]:
    answer = adapt(*arguments, "--json")
    assert answer.exit_code == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    assert found["version"] == 1
    return found


def refused(*arguments: object) -> str:
    """The one line that a command which cannot do its work ends with."""
    answer = adapt(*arguments)
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    lines = [line for line in answer.stderr.splitlines() if not line.startswith("flatout: precision")]
    assert len(lines) == 1 and lines[0].startswith("flatout: "), answer.stderr
    return lines[0]


def test_status_says_how_far_it_is(run: Path) -> None:
    answer = adapt("status", run)
    assert "phase1  step 6 of 6, finished" in answer.stdout
    assert "sentiment" in answer.stdout and "accuracy" in answer.stdout
    found = document("status", run)
    assert found["format"] == "flatout-adapters-status"
    assert [phase["finished"] for phase in found["phases"]] == [True, True, True]


def test_evaluate_shows_a_table_and_writes_a_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    answer = adapt("evaluate", run, "--rows", 3, "--html", page, "--device", "cpu")
    assert answer.exit_code == 0, answer.stderr
    header = answer.stdout.splitlines()[0].split()
    assert header[:4] == ["task", "metric", "oracle", "routed"]
    assert "routing accuracy" in answer.stdout and page.exists()
    found = document("evaluate", run, "--rows", 3)
    oracle = next(each["by_task"]["sentiment"] for each in found["scores"] if each["routing"] == "oracle")
    shown = [line[18:].split()[:2] for line in answer.stdout.splitlines()[1:3]]  # every score of a task
    assert shown == [[name, f"{oracle[name]:.1f}"] for name in ("accuracy", "macro_f1")]
    assert found["format"] == "flatout-adapters-evaluation" and found["num_rows"]["sentiment"] == 3


def test_predict_answers_arguments_and_lines(run: Path) -> None:
    answer = adapt("predict", run, "the film is moving", "--task", "sentiment")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.startswith("sentiment (n/a): ")
    found = document("predict", run, "the film is moving")
    assert found["answers"][0]["confidence"] is not None
    piped = adapt("predict", run, "--task", "sentiment", text="a film\n\na story\n")
    assert len(piped.stdout.splitlines()) == 2
    assert "there is no text to answer" in refused("predict", run)
    assert "there is no text to answer" in refused("predict", run, " ")


def test_export_writes_folders(run: Path, tmp_path: Path) -> None:
    found = document("export", run, "--to", tmp_path / "peft")
    assert [Path(folder).name for folder in found["folders"]] == ["sentiment", "translation"]
    answer = adapt("export", run, "--to", tmp_path / "one", "--task", "translation")
    assert answer.stdout.strip().endswith("translation")
    assert "did you mean translation" in refused(
        "export", run, "--to", tmp_path / "no", "--task", "translate"
    )
    assert not (tmp_path / "no").exists()
    (tmp_path / "file").touch()
    assert "cannot be written" in refused("export", run, "--to", tmp_path / "file")


def test_a_finished_run_says_so_and_is_left_alone(config: Path, run: Path) -> None:
    answer = adapt("train", config, "--resume", "--json")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stderr.count("it is not trained again") == 3
    assert json.loads(answer.stdout)["skipped"] == ["phase1", "phase2", "phase3"]
    assert "is finished, at step 6; continue with --resume" in refused("train", config)


def test_flags_win_over_the_file_and_set_over_flags(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    answer = adapt(
        "train",
        config,
        "--phase",
        1,
        "--out",
        out,
        "--set",
        "phase1.steps=2",
        "--set",
        "tasks.qa={rank: 1, data: {source: generated}}",
    )
    assert answer.exit_code == 0, answer.stderr
    (kept,) = out.glob("phase1/*/state.json")
    saved = json.loads(kept.read_text())["config"]
    assert saved["phase1"]["steps"] == 2 and set(saved["tasks"]) == {"sentiment", "translation", "qa"}


def test_what_cannot_be_done_is_one_line(config: Path, model: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    assert "no settings file at" in refused("train", tmp_path / "absent.yaml")
    assert "--phase '4' does not exist" in refused("train", config, "--phase", 4)
    assert "--heads-only has no phase 2" in refused("train", config, "--phase", 2, "--heads-only")
    assert "did you mean steps?" in refused("train", config, *out, "--set", "phase1.step=1")
    assert "is not KEY=VALUE" in refused("train", config, *out, "--set", "phase1.steps")
    assert "is not valid YAML" in refused("train", config, *out, "--set", "phase1.steps=[")
    assert "phase1.steps=0 is below 1" in refused("train", config, *out, "--set", "phase1.steps=0")
    assert "no model folder at" in refused("train", config, *out, "--model", tmp_path / "absent")
    assert "no task 'poetry'" in refused("train", config, *out, "--set", "tasks.poetry={}")
    assert "phase3 needs phase1" in refused("train", config, *out, "--phase", 3)
    assert "holds no run of adapters" in refused("status", tmp_path)
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(f"model: {model}\ntasks: {{qa: {{rnak: 3}}}}\n")
    assert "unknown.yaml sets 'rnak'" in refused("train", unknown)
    assert not (tmp_path / "run").exists()


def test_a_line_of_data_that_does_not_parse_is_one_line_and_nothing_is_lost(
    config: Path, run: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fine", "label": 1}\nnot json\n')
    data = ("--set", f"tasks.sentiment={{data: {{path: {rows}}}}}")
    assert "rows.jsonl:2" in refused("train", config, "--out", tmp_path / "run", *data)
    assert not (tmp_path / "run").exists()
    before = sorted(run.rglob("*"))
    other = save_tiny(tmp_path / "other", seed=1)
    assert "belongs to a model other" in refused("evaluate", run, "--model", other)
    assert before == sorted(run.rglob("*"))


def test_what_is_no_run_and_no_number_of_rows_is_one_line(run: Path, config: Path) -> None:
    assert "holds no run of adapters" in refused("status", config)
    for rows in (0, -3):
        assert f"--rows {rows} is below 1; give at least 1" in refused("evaluate", run, "--rows", rows)


def test_a_finished_run_of_another_model_is_one_line(run: Path, config: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=7)
    said = refused("train", config, "--resume", "--model", other)
    assert "belongs to a model other than" in said and str(other) in said
    assert adapt("train", config, "--resume").exit_code == 0


def test_an_interrupted_run_says_so_and_how_to_go_on(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    shutil.rmtree(out / "phase3" / "step-000004")  # as a kill after step 3 leaves it
    answer = adapt("status", out)
    assert "phase3  step 4 of 4, interrupted, kept at step 2" in answer.stdout
    assert answer.stdout.endswith(f"continue with  flatout adapt train {out} --resume\n")
    done = adapt("train", out, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "phase3  step 4 of 4, finished" in done.stdout and "continue with" not in done.stdout
