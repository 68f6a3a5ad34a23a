from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flatout.cli import tune
from flatout.cli.app import all_verbs, application
from flatout.ground.errors import BadInput
from flatout.tuner.check.answer import CountChange
from flatout.tuner.check.check import Checked
from flatout.tuner.results.outcome import Tried, Tuning
from flatout.tuner.results.prescription import Kept, Prescription
from flatout.tuner.verdict import Gain

ROOT = Path(__file__).resolve().parents[3]
GAIN = Gain(ratio=1.5, low=1.4, high=1.6, num_pairs=3, best=1.55)
NOISE = Gain(ratio=1.0, low=0.99, high=1.01, num_pairs=3, best=1.01)


def tried(name: str, answer: str, gain: Gain | None) -> Tried:
    return Tried(
        name=name,
        value=2,
        safety="exact",
        summary="",
        answer=answer,
        reason="because",
        gain=gain,  # type: ignore[arg-type]
    )


DONE = Tuning(
    tried=(tried("loader-workers", "kept", GAIN), tried("threads", "failed", None)),
    noise=NOISE,
    reproducible=True,
    total=GAIN,
    prescription=Prescription(
        command=("train.py", "--name", "a b"), treatments=(Kept(name="loader-workers", value=2),)
    ),
    num_trials=20,
    step_s=0.1,
    diff="--- a/model.py\n+++ b/model.py\n-for b in x: [loop]\n+" + "gather, " * 20,
)


def test_every_treatment_is_shown_with_its_answer_and_its_gain(capsys: pytest.CaptureFixture[str]) -> None:
    tune._show(DONE, Path("best.toml"), module=False)
    shown = capsys.readouterr().out
    assert "Run it: flatout run --with best.toml train.py --name 'a b'\n" in shown
    tune._show(DONE, tune.DEFAULT, ranks=2)
    assert "Run it: torchrun --nproc-per-node 2 -m flatout run train.py" in capsys.readouterr().out
    assert DONE.diff in shown and "flatout tune --apply" in shown
    assert "loader-workers 2" in shown and "1.50× [1.40, 1.60]" in shown and "failed" in shown
    assert "The job against itself: 0.99× to 1.01× over 3 pairs" in shown


def test_a_job_that_nothing_makes_faster_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    done = Tuning(
        tried=(),
        noise=NOISE,
        reproducible=True,
        total=None,
        prescription=Prescription(command=("train.py",), treatments=()),
        num_trials=7,
        step_s=0.1,
    )
    tune._show(done, Path("flatout.toml"))
    assert "No treatment that was tried gains" in capsys.readouterr().out


def checked(answer: str, **known: Any) -> Checked:
    return Checked(answer=answer, reason="head's step takes 1.2 of base's", base="main", **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(("answer", "code"), [("ok", 0), ("slower", 1), ("cannot tell", 3)])
def test_a_check_answers_by_its_exit_code_and_says_what_it_could_see(
    answer: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = CountChange(name="waits", base=0.0, head=1.0)
    found = checked(answer, smallest=0.021, same_losses=True, changes=(waits,), num_runs=10)
    monkeypatch.setattr("flatout.api.check_script", lambda *_, **__: found)
    ran = CliRunner().invoke(application(), ["check", "--base", "main", "train.py"])
    assert ran.exit_code == code and ran.stdout.startswith(f"{answer}: head's step")
    assert "10 runs could show here: 2 %" in ran.stdout and "waits 0 → 1" in ran.stdout
    asked = CliRunner().invoke(application(), ["check", "--base", "main", "--json", "train.py"])
    document = json.loads(asked.stdout)
    assert (document["format"], document["answer"], asked.exit_code) == ("flatout-check", answer, code)


def test_a_check_without_anything_to_compare_with_is_refused() -> None:
    for arguments, words in (
        (["check", "train.py"], "give either --base REF or --against FILE"),
        (["check", "--base", "main"], "no script given"),
        (["check", "--base", "main", "--pairs", "2", "train.py"], "at least 4 pairs"),
    ):
        ran = CliRunner().invoke(application(), arguments)
        assert ran.exit_code == 2 and words in ran.stderr


def test_the_workflow_of_the_docs_is_one_and_calls_flatout_as_it_is() -> None:
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    workflow = YAML(typ="safe").load(block)
    assert workflow.keys() == {"name", "on", "jobs"} and workflow["on"] == "pull_request"
    (job,) = workflow["jobs"].values()
    assert job.keys() == {"runs-on", "steps"}
    assert all(("uses" in step) != ("run" in step) for step in job["steps"]) and len(job["steps"]) == 4
    shell = job["steps"][-1]["run"]
    subprocess.run(["bash", "-n", "-c", shell], check=True)
    (call,) = [line for line in shell.splitlines() if line.startswith("flatout ")]
    given = shlex.split(call.partition(">")[0])[1:]
    command = dict(all_verbs())[given[0]]
    with command.make_context("check", given[1:]) as context:
        assert context.params["base"] == "origin/$GITHUB_BASE_REF" and context.params["json_output"]
        assert context.params["command"] == ["train.py", "--epochs", "1"]


def test_a_page_that_cannot_be_written_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.api.tune_script", lambda *_, **__: pytest.fail("it began"))
    (tmp_path / "train.py").write_text("")
    for flag in ("--html", "--to"):
        ran = CliRunner().invoke(application(), ["tune", flag, str(tmp_path), str(tmp_path / "train.py")])
        assert ran.exit_code == 2 and f"{flag} {tmp_path} is a folder; name a file in it" in ran.stderr
        ran = CliRunner().invoke(
            application(), ["tune", flag, f"{tmp_path}/train.py/x", str(tmp_path / "train.py")]
        )
        assert ran.exit_code == 2 and "train.py/x cannot be written" in ran.stderr


def test_the_result_is_shown_even_if_its_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise BadInput("flatout.toml cannot be written (1 KB): No space left on device")

    monkeypatch.setattr("flatout.api.tune_script", lambda *_, **__: DONE)
    monkeypatch.setattr("flatout.api.save_tuning", full)
    (tmp_path / "train.py").write_text("")
    ran = CliRunner().invoke(application(), ["tune", str(tmp_path / "train.py")])
    assert ran.exit_code == 2 and "No space left" in ran.stderr
    assert "loader-workers 2" in ran.stdout and "Everything kept, together" in ran.stdout
