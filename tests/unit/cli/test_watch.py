"""The verb: what its flags mean together, one sample, the list of runs, and a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flatout.cli.watch import watch
from flatout.ground.errors import BadInput
from flatout.ground.runs import end_run, find_run
from flatout.monitor.sample import Sample
from tests.support.monitor import HOSTILE, START_S, engine_run, epochs, kept_run, phases, story


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv("FLATOUT_RUNS", str(folder))
    return folder


def run(*arguments: str, columns: int = 120) -> Result:
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_interspersed_args": False})(watch)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def refused(*arguments: str) -> BadInput:
    result = run(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    return result.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pid", "1", "--run", "train.py"), "--pid and --run exclude each other"),
        (("--list", "--replay", "x"), "--replay and --list exclude each other"),
        (("train.py",), "'train.py' is not an option"),
        (("--run",), "--run needs a script"),
        (("-m",), "-m works only with --run"),
        (("--speed", "2"), "--speed works only with --replay"),
        (("--port", "1"), "--port works only with --web"),
        (("--web", "--run", "absent.py"), "no script at absent.py"),
        (("--web", "--list"), "--web serves a page"),
        (("--web", "--once"), "--web serves a page"),
        (("--json", "--run", "train.py"), "--run leaves stdout to the script"),
        (("--run", "absent.py"), "no script at absent.py"),
        (("--run", "-m", "absent_module"), "there is no module 'absent_module'"),
        (("--pid", "99999999"), "process 99999999 is not running"),
        (("--pid", "-5"), "process -5 is not running"),
        (("--replay", "absent"), "'absent' names no run"),
        (("--once", "--hz", "100"), "100.0 samples per second"),
        (("--once", "--prometheus", "99999"), "port 99999"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    error = refused(*arguments)
    assert message in error.message
    assert "\n" not in str(error)


def test_the_hint_is_the_command_that_works() -> None:
    assert refused("train.py").hint == "flatout watch --run train.py"


def test_one_sample_as_a_document() -> None:
    result = run("--once", "--json", "--hz", "10")
    assert result.exit_code == 0
    sample = Sample.from_json(json.loads(result.stdout))
    assert sample.span_s is not None and sample.host.cpu_share is not None
    assert sample.gpus or sample.missing["gpus"]


def test_one_sample_as_a_picture_and_as_a_table(tmp_path: Path) -> None:
    result = run("--once", "--hz", "10", "--csv", str(tmp_path / "s.csv"))
    assert result.exit_code == 0
    assert "CPU" in result.stdout and "RAM" in result.stdout
    assert "quit" not in result.stdout and "verdict needs" not in result.stdout
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 3


def test_runs_are_listed_the_latest_first(runs: Path) -> None:
    assert run("--list").stdout == f"there are no runs in {runs}\n"
    kept_run(runs, story(seconds=75), pid=1)
    kept_run(runs, story(seconds=3), pid=99999999, name=HOSTILE, ended=False)
    result = run("--list")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["run", "verb", "state", "lasted", "command"]
    assert any("train-1 " in line and "ended" in line and "1:14" in line for line in lines)
    assert any("died" in line and "n/a" in line for line in lines)
    assert "\x1b" not in result.stdout
    document = json.loads(run("--list", "--json").stdout)
    assert (document["format"], len(document["runs"])) == ("flatout-runs", 2)
    assert {each["state"] for each in document["runs"]} == {"ended", "died"}


def test_the_list_tells_a_run_that_failed_from_one_that_finished(runs: Path) -> None:
    for name, end in (("good", "finished"), ("bad", "ValueError: x")):
        end_run(kept_run(runs, story(seconds=3), name=name), time_s=START_S + 3, end=end)
    lines = run("--list", columns=160).stdout.splitlines()
    assert any("good" in line and "finished" in line for line in lines)
    assert any("bad" in line and "failed" in line for line in lines)


def test_runs_of_engines_stand_in_the_list(runs: Path) -> None:
    engine_run(runs, epochs(0.1, 0.5), kind="evolve")
    engine_run(runs, phases(), kind="adapt", ended=False)
    lines = run("--list", columns=160).stdout.splitlines()
    assert lines[0].split() == ["run", "verb", "state", "lasted", "started", "steps", "last", "command"]
    assert any("evolve" in line and "finished" in line and "reward_heldout 0.5" in line for line in lines)
    assert any("adapt" in line and "died" in line and " 25 " in line for line in lines)
    documents = {each["kind"]: each for each in json.loads(run("--list", "--json").stdout)["runs"]}
    assert (documents["evolve"]["end"], documents["evolve"]["steps"]) == ("finished", 2)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_list_does_not_fold(runs: Path, columns: int) -> None:
    """A name that is cut keeps its beginning and its process, by which the run can be asked for."""
    folder = kept_run(runs, story(seconds=75), pid=4711, name="a-job-with-a-name-that-goes-on-and-on-and-on")
    kept_run(runs, story(seconds=75), pid=4712, name="short")
    lines = run("--list", columns=columns).stdout.splitlines()
    assert len(lines) == 3
    assert all(len(line) <= columns for line in lines)
    [row] = [line for line in lines if "4711" in line]
    name = row.split()[0]
    start, cut, end = name.partition("…")
    assert folder.name.startswith(start) and folder.name.endswith(end)
    assert find_run(start if cut else name) == find_run("-4711") == folder
    assert "ended" in row
    if columns >= 80:
        assert not cut and "1:14" in row
    if columns >= 120:
        assert "started" in lines[0]


def test_a_run_is_played_again_as_lines(runs: Path) -> None:
    samples = story(seconds=20, wait=0.5)
    kept_run(runs, samples)
    result = run("--replay", "train", "--speed", "1e9")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert sum("it/s" in line for line in lines) == 20
    assert sum(line.startswith("verdict: the loader is too slow") for line in lines) == 1
    documents = run("--replay", "train", "--speed", "1e9", "--json").stdout.splitlines()
    assert [json.loads(line)["time_s"] for line in documents] == [each.time_s for each in samples]


def test_a_replay_needs_a_speed(runs: Path) -> None:
    kept_run(runs, story(seconds=3))
    for speed in ("0", "-1"):
        assert f"--speed {speed}" in refused("--replay", "train", "--speed", speed).message


def test_the_flags_are_these() -> None:
    """Everyday options become flags; adding one is a decision."""
    flags = (
        "pid run name replay speed from list once json hz log jsonl csv tensorboard prometheus web host port"
        " token"
    )
    app = typer.Typer(add_completion=False)
    app.command()(watch)
    known = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    assert known == {"command", "-m", *(f"--{flag}" for flag in flags.split())}
