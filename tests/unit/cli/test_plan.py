"""`flatout plan` as a user meets it, with a straight line in the place of the memory room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import flatout.planner.plan
from flatout.cli.app import application
from flatout.planner.forecast.load import ForecastRequest
from tests.support import planner as plans

ON_24GB = ("--model", "pkg:build", "--gpu-memory", "24GB")


@pytest.fixture(autouse=True)
def forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flatout.planner.plan, "load_forecast", plans.toy_maker())


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return plans.write_curriculum(tmp_path)


def run(*arguments: str | Path, columns: int = 100, answer: str | None = None) -> Result:
    return CliRunner().invoke(
        application(), ["plan", *map(str, arguments)], env={"COLUMNS": str(columns)}, input=answer
    )


def one_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("flatout: ")


@pytest.mark.parametrize("verb", ["show", "fit", "undo"])
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    answer = run(verb, "--help")
    assert answer.exit_code == 0
    assert f"\n    flatout plan {verb} conf/" in answer.stdout


def test_the_flags_of_fit_are_these() -> None:
    flags = (
        "model task make-batch gpu gpu-memory margin profile effective allow choose apply yes ranks mapping"
    )
    flags += " knob set lengths expandable-segments no-expandable-segments native no-cache json"
    text = run("fit", "--help").stdout
    assert all(f"--{flag} " in text or f"--{flag}\n" in text for flag in flags.split())


def test_show_tells_where_each_value_stands(conf: Path) -> None:
    answer = run("show", conf)
    assert answer.exit_code == 0
    assert "data_loader.batch_size (config.yaml:3)" in answer.stdout
    assert "memory is n/a: name it with --model" in answer.stdout


def test_show_ends_with_findings(conf: Path) -> None:
    answer = run("show", conf, *ON_24GB)
    assert answer.exit_code == 1
    assert "under-used" in answer.stdout
    settled = run("show", conf, *ON_24GB, "--set", "data_loader.batch_size=16")
    assert (settled.exit_code, "well used" in settled.stdout) == (0, True)


def test_show_as_a_document(conf: Path) -> None:
    document = json.loads(run("show", conf, *ON_24GB, "--json").stdout)
    assert [stage["verdict"] for stage in document["stages"]] == ["under-used", "under-used"]


def test_fit_shows_the_diff_and_writes_nothing(conf: Path) -> None:
    before = plans.contents(conf)
    answer = run("fit", conf, *ON_24GB)
    assert answer.exit_code == 0
    assert (
        "-  batch_size: 4          # per device\n+  batch_size: 16          # per device\n" in answer.stdout
    )
    assert plans.contents(conf) == before
    assert not (conf / ".flatout").exists()


def test_apply_twice_and_undo(conf: Path) -> None:
    before = plans.contents(conf)
    first = run("fit", conf, *ON_24GB, "--apply", "--yes")
    assert first.exit_code == 0
    assert (
        first.stderr == f"flatout: wrote config.yaml; flatout plan undo {conf / 'config.yaml'} reverts it\n"
    )
    after = plans.contents(conf)
    assert after != before
    second = run("fit", conf, *ON_24GB, "--apply", "--yes")
    assert second.exit_code == 0
    assert second.stderr.splitlines() == [
        f"flatout: nothing to change: {conf / 'config.yaml'} already matches the plan"
    ]
    assert plans.contents(conf) == after
    undone = run("undo", conf)
    assert (undone.exit_code, undone.stdout.startswith("restored config.yaml from ")) == (0, True)
    assert plans.contents(conf) == before
    assert "nothing to undo" in one_line(run("undo", conf))


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_apply_asks_where_somebody_can_answer(
    answer: str, written: bool, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plans.contents(conf)
    monkeypatch.setattr("flatout.cli.plan.can_ask", lambda: True)
    result = run("fit", conf, *ON_24GB, "--apply", answer=answer)
    assert result.exit_code == 0
    assert "Write config.yaml?" in result.stderr
    assert (plans.contents(conf) != before) is written


def test_an_interrupted_question_writes_nothing(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plans.contents(conf)
    monkeypatch.setattr("flatout.cli.plan.can_ask", lambda: True)
    result = run("fit", conf, *ON_24GB, "--apply", answer="")  # the end of the input
    assert result.exit_code == 130
    assert result.stderr.endswith("flatout: interrupted: nothing was written\n")
    assert plans.contents(conf) == before


def test_apply_without_a_terminal_needs_yes(conf: Path) -> None:
    assert "no terminal to answer on; add --yes" in one_line(run("fit", conf, *ON_24GB, "--apply"))
    assert "no terminal to answer on; add --yes" in one_line(run("fit", conf, *ON_24GB, "--apply", "--json"))
    assert "--yes has no effect without --apply" in one_line(run("fit", conf, *ON_24GB, "--yes"))


def test_fit_as_a_document(conf: Path) -> None:
    document: dict[str, Any] = json.loads(run("fit", conf, *ON_24GB, "--json").stdout)
    assert document["chosen"] == ["largest batch"]
    assert "+  batch_size: 16" in document["diff"]
    assert (document["backup"], document["unwritable"], document["warnings"]) == (None, None, [])
    written = json.loads(run("fit", conf, *ON_24GB, "--json", "--apply", "--yes").stdout)
    assert Path(written["backup"]).is_dir()


def test_a_chosen_suggestion_is_what_is_written(conf: Path) -> None:
    run("fit", conf, *ON_24GB, "--choose", "with checkpointing", "--apply", "--yes")
    text = (conf / "config.yaml").read_text()
    assert "gradient_checkpointing: true" in text and "accumulate_grad_batches: 1 " in text


def test_what_cannot_be_written_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch_size: 64\n")
    answer = run("fit", tmp_path, "--model", "x", "--gpu-memory", "12GB")
    assert answer.exit_code == 0
    assert "this suggestion cannot be written:" in answer.stdout
    refused = run("fit", tmp_path, "--model", "x", "--gpu-memory", "12GB", "--apply", "--yes")
    assert "there is no place to write it" in one_line(refused)
    assert (tmp_path / "c.yaml").read_text() == "batch_size: 64\n"


def test_a_job_that_does_not_fit_is_one_line_and_two(conf: Path) -> None:
    line = one_line(run("fit", conf, "--model", "x", "--gpu-memory", "3GB"))
    assert line.startswith("batch_size=1 needs 5.21 GiB in 01_stage; 3GB has 2.79 GiB free")
    assert "LoRA" in line and "a GPU from" in line


def test_an_effective_batch_and_ranks(conf: Path) -> None:
    answer = run("fit", conf, *ON_24GB, "--effective", "256", "--ranks", "2")
    assert (
        "the effective batch goes from 128 to 256 (×2); the learning rate 0.0002 is left alone"
        in " ".join(answer.stdout.split())
    )


def test_what_cannot_be_written_is_said_before_any_work(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_asked(request: object) -> object:
        raise AssertionError("the job was loaded")

    monkeypatch.setattr(flatout.planner.plan, "load_forecast", not_asked)
    apply = (*ON_24GB, "--apply", "--yes")
    (conf / "config.yaml").chmod(0o444)
    assert "config.yaml is read-only; nothing was written" in one_line(run("fit", conf, *apply))
    (tmp_path / "link.yaml").symlink_to(conf / "config.yaml")
    assert "is a symbolic link to" in one_line(run("fit", tmp_path / "link.yaml", *apply))
    (tmp_path / "alias.yaml").write_text("a: &a 8\nbatch_size: *a\naccumulation: 2\n")
    assert "is an alias: its characters stand at a" in one_line(run("fit", tmp_path / "alias.yaml", *apply))


def test_undo_is_of_the_config_that_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path in paths:
        path.write_text("batch_size: 4\naccumulation: 16\n")
        assert run("fit", path, *ON_24GB, "--apply", "--yes").exit_code == 0
    assert run("undo", paths[0]).stdout.startswith("restored a.yaml from ")
    assert ["batch_size: 4\n" in path.read_text() for path in paths] == [True, False]
    assert "holds no backup of a.yaml" in one_line(run("undo", paths[0]))
    assert run("undo", paths[1]).exit_code == 0


def test_an_interrupt_while_it_works_says_that_nothing_was_written(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(request: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(flatout.planner.plan, "load_forecast", interrupted)
    before = plans.contents(conf)
    result = run("fit", conf, *ON_24GB, "--apply", "--yes")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "flatout: interrupted: nothing was written, and traces so far are kept\n"
    uncached = run("fit", conf, *ON_24GB, "--no-cache")
    assert uncached.stderr == "flatout: interrupted: nothing was written\n"
    assert plans.contents(conf) == before


def test_the_job_is_asked_for_as_the_flags_say(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ForecastRequest] = []

    def make(request: ForecastRequest) -> plans.ToyForecast:
        asked.append(request)
        return plans.ToyForecast()

    monkeypatch.setattr(flatout.planner.plan, "load_forecast", make)
    run("show", conf, *ON_24GB, "--task", "masked-lm", "--no-cache")
    run("fit", conf, *ON_24GB, "--make-batch", "pkg:make")
    first, second = asked
    assert (first.task, first.make_batch, first.cache) == ("masked-lm", None, False)
    assert (second.task, second.make_batch, second.cache) == (None, "pkg:make", True)
    assert {path.name for path in first.configs} == {"config.yaml", "01_stage.yaml", "02_stage.yaml"}
    assert first.keys_of is not None
    assert first.keys_of(["batch_size", "n_negatives"]) == {"data_loader.batch_size", "n_negatives"}


def test_lengths_decide_and_are_told(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch_size": 8, "n_negatives": 1, "length": 16}
    monkeypatch.setattr(flatout.planner.plan, "load_forecast", plans.toy_maker(sizes=sizes))
    (tmp_path / "lengths.csv").write_text("length,count\n10,90\n100,10\n")
    for verb in ("show", "fit"):
        answer = run(verb, conf, *ON_24GB, "--lengths", tmp_path / "lengths.csv")
        words = " ".join(answer.stdout.split())
        assert "lengths of 100 sequences (lengths.csv): - batches of" in words
        assert "reach 100" in words
    shown = run("show", conf, *ON_24GB, "--lengths", tmp_path / "lengths.csv").stdout
    assert "the longest of 100 in lengths.csv" in shown
    (tmp_path / "lengths.csv").write_text("none\nat all\n")
    line = one_line(run("fit", conf, *ON_24GB, "--lengths", tmp_path / "lengths.csv"))
    assert "line 2: 'at all' is not a length" in line


def test_a_job_without_a_length_cannot_take_lengths(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("10\n")
    line = one_line(run("show", conf, *ON_24GB, "--lengths", tmp_path / "lengths.csv"))
    assert "the job has no size 'length'" in line


@pytest.mark.parametrize("verb", ["show", "fit"])
def test_what_the_model_prints_is_no_part_of_the_document(
    verb: str, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = plans.toy_maker()

    def noisy(request: ForecastRequest) -> Any:
        print("building the model")
        return make(request)

    monkeypatch.setattr(flatout.planner.plan, "load_forecast", noisy)
    result = run(verb, conf, *ON_24GB, "--json")
    assert json.loads(result.stdout)["version"] == 1
    assert "building the model" in result.stderr


def test_the_commands_that_are_named_can_be_pasted(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text("batch_size: 4\naccumulation: 16\n")
    path.chmod(0o444)
    assert one_line(run("fit", path, *ON_24GB, "--apply", "--yes")).endswith(f"chmod u+w '{path}'")
    path.chmod(0o644)
    applied = run("fit", path, *ON_24GB, "--apply", "--yes")
    assert applied.stderr == f"flatout: wrote my run.yaml; flatout plan undo '{path}' reverts it\n"
