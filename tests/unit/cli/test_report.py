"""`flatout report` and `flatout compare` on runs that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flatout.cli.report import compare, report, show_in
from flatout.ground.errors import BadInput
from flatout.ground.runs import end_run
from flatout.monitor.past.compare import FigureUnit
from tests.support.monitor import HOSTILE, START_S, engine_run, epochs, kept_run, story


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv("FLATOUT_RUNS", str(folder))
    return folder


def run(*arguments: str, columns: int = 120) -> Result:
    app = typer.Typer(add_completion=False)
    app.command()(report)
    app.command()(compare)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def test_a_run_in_figures(runs: Path) -> None:
    kept_run(runs, story(seconds=60, wait=0.4))
    result = run("report", "train")
    assert result.exit_code == 0
    for words in (
        "81.0 ms",
        "NVIDIA H200",
        "per step",
        "wait 4",
        "data, 100 % of the run",
        "of 256 GiB at most",
    ):
        assert words in result.stdout
    document = json.loads(run("report", "train", "--json").stdout)
    assert (document["format"], document["bounds"][0]["bound"]) == ("flatout-run-summary", "data")


def test_a_run_of_an_engine_is_reported_by_its_log(runs: Path, tmp_path: Path) -> None:
    engine_run(runs, epochs(0.1, 0.5), kind="evolve")
    result = run("report", "evolve")
    for words in ("evolve, finished", "reward_heldout", "0.5", "4.00 s"):
        assert words in result.stdout
    assert json.loads(run("report", "evolve", "--json").stdout)["format"] == "flatout-run-digest"
    engine_run(runs, epochs(0.1, 0.5), kind="adapt")
    refused = run("report", "adapt", "--html", str(tmp_path / "run.html"))
    assert isinstance(refused.exception, BadInput) and "has no page" in str(refused.exception)


def test_a_search_names_the_verb_that_shows_it(runs: Path) -> None:
    engine_run(runs, [], kind="steer")
    assert "flatout steer report" in run("report", "steer").stdout


def test_runs_of_one_engine_are_compared_and_of_two_are_not(runs: Path) -> None:
    first = engine_run(runs, epochs(0.1, 0.5), kind="evolve")
    second = engine_run(runs, epochs(0.1, 0.75), kind="evolve")
    result = run("compare", str(first), str(second))
    assert "reward_heldout" in result.stdout and "0.75" in result.stdout
    assert json.loads(run("compare", str(first), str(second), "--json").stdout)["figures"]
    watched = kept_run(runs, story(seconds=20))
    refused = run("compare", str(first), str(watched))
    assert isinstance(refused.exception, BadInput) and "mean different things" in str(refused.exception)


def test_a_page_and_plots_are_written(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = kept_run(runs, story(seconds=20))
    html, png = tmp_path / "run.html", tmp_path / "run.png"
    result = run("report", str(folder), "--html", str(html), "--png", str(png))
    assert result.exit_code == 0
    assert html.read_text().startswith("<!doctype html>")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert str(html) in result.stderr and str(html) not in result.stdout


def test_a_run_of_nothing_but_the_host(runs: Path) -> None:
    kept_run(runs, story(seconds=10, gpus=False), name=HOSTILE)
    result = run("report", "script")
    assert result.exit_code == 0
    assert "n/a" in result.stdout and "\x1b" not in result.stdout


def test_an_endless_loss_is_a_document_still(runs: Path) -> None:
    from dataclasses import replace

    samples = story(seconds=10)
    last = samples[-1]
    assert last.job is not None
    kept_run(runs, (*samples[:-1], replace(last, job=replace(last.job, loss=float("inf")))))
    document = json.loads(run("report", "train", "--json").stdout)
    assert document["last_loss"] is None


def test_two_runs_side_by_side(runs: Path) -> None:
    kept_run(runs, story(seconds=120, wait=0.4, step_s=0.13), pid=1111)
    kept_run(runs, story(seconds=120, wait=0.05), pid=2222)
    result = run("compare", "1111", "2222")
    assert result.exit_code == 0
    (step,) = (line for line in result.stdout.splitlines() if line.startswith("step time"))
    assert "130 ms" in step and " 80.9 ms" in step and "0.62×" in step and step.rstrip().endswith("better")
    assert "within noise" in result.stdout
    document = json.loads(run("compare", "1111", "2222", "--json").stdout)
    assert document["format"] == "flatout-comparison"
    same = run("compare", "1111", "1111")
    assert same.stdout.splitlines()[-1] == "no difference that matters"


def test_short_runs_are_not_judged(runs: Path) -> None:
    kept_run(runs, story(seconds=6), pid=1111)
    kept_run(runs, story(seconds=6, step_s=0.2, gpus=False), pid=2222)
    lines = run("compare", "1111", "2222").stdout.splitlines()
    assert "too short to tell them apart" in lines
    assert "note: they ran on different GPUs: NVIDIA H200 and none" in lines


def test_a_name_that_fits_several_runs_is_refused(runs: Path) -> None:
    kept_run(runs, story(seconds=3), pid=1)
    kept_run(runs, story(seconds=3), pid=2)
    error = run("report", "train").exception
    assert isinstance(error, BadInput) and "names several runs" in error.message


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.081, "s", "81.0 ms"),
        (2**30, "bytes", "1.00 GiB"),
        (0.5, "share", "50 %"),
        (48.9, "J", "48.9 J"),
        (600.0, "W", "600 W"),
        (12.3456, "per s", "12.35/s"),
        (None, "W", "n/a"),
    ],
)
def test_figures_have_their_unit(value: float | None, unit: FigureUnit, shown: str) -> None:
    assert show_in(unit, value) == shown


def test_a_run_that_failed_says_so_in_report_and_comparison(runs: Path) -> None:
    for name, end in (("good", "finished"), ("bad", "OutOfMemoryError: 3 GiB")):
        folder = kept_run(runs, story(seconds=60), name=name)
        end_run(folder, time_s=START_S + 60, end=end, exit_code=int(end != "finished"))
    assert "failed: OutOfMemoryError: 3 GiB" in run("report", "bad").stdout
    assert json.loads(run("report", "bad", "--json").stdout)["exit_code"] == 1
    assert "note: run 2: failed: OutOfMemoryError: 3 GiB" in run("compare", "good", "bad").stdout
