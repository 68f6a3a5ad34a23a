"""The verb: help with examples, answers on stdout, and one line for what cannot be done."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flatout.cli.app import application
from tests.support.steering import write_tiny

VERBS = ("extract", "fit", "search", "apply", "report")
BRIEF = (
    "--trials",
    6,
    "--method",
    "mean-difference",
    "--strength",
    "-1:1.5",
    "--rungs",
    2,
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering"))


def steer(*arguments: object) -> Result:
    return CliRunner().invoke(application(), ["steer", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The one line that a command which cannot do its work ends with."""
    answer = steer(*arguments)
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("flatout: "), answer.stderr
    return last


@pytest.fixture(scope="module")
def run(tiny: Path) -> Path:
    out = tiny / "run"
    answer = steer(
        "search", "--model", tiny / "model", "--questions", tiny / "questions.jsonl", "--out", out, *BRIEF
    )
    assert answer.exit_code == 0, answer.output
    assert "fresh questions" in answer.stdout.splitlines()[0]
    assert f"report      {out / 'report.html'}" in answer.stdout
    assert "80 of 80 texts" in answer.stderr, "what the vectors are fitted on"
    assert re.search(r"3 of 6 trials · .*trial.* · about \d+ s left · ", answer.stderr)
    assert "6 of 6 trials · " in answer.stderr
    return out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    assert f"\n  {verb} " in steer("--help").stdout
    answer = steer(verb, "--help")
    assert answer.exit_code == 0
    assert f"flatout steer {verb}" in answer.stdout


def test_extract_and_fit_answer_in_lines_and_in_json(tiny: Path, tmp_path: Path) -> None:
    given = (
        tiny / "questions.jsonl",
        "--model",
        tiny / "model",
        "--store",
        tmp_path / "s",
        "--device",
        "cpu",
    )
    answer = steer("extract", *given, "--layers", "0-1")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.startswith("160 texts x 2 layers x 32 in ")
    assert "store  " in answer.stdout and "storing pays from use" in answer.stdout
    answer = steer("extract", *given, "--layers", "0-1", "--tier", "cpu=1GiB")
    assert (
        "160 distinct texts were already stored" in answer.stdout
        and "tier   cpu holds 40.0 KiB of 1.00 GiB" in answer.stdout
    )
    document = json.loads(steer("extract", *given, "--json").stdout)
    assert (document["format"], document["num_texts"]) == ("flatout-steering-extraction", 160)
    answer = steer("fit", *given, "--out", tmp_path / "v", "--method", "pca", "--method", "lda")
    assert [line.split()[0] for line in answer.stdout.splitlines()] == ["pca", "lda"]
    document = json.loads(steer("fit", *given, "--out", tmp_path / "v", "--method", "pca", "--json").stdout)
    assert document["methods"][0]["layers"] == [0, 1, 2, 3]


def test_a_search_goes_on_from_its_folder_and_answers_in_json(run: Path) -> None:
    answer = steer("search", run, "--trials", 8, "--json")
    document = json.loads(answer.stdout)
    assert (document["format"], len(document["trials"])) == ("flatout-steering", 8)
    assert document["retest"]["num_questions"] == 20


def test_report_and_apply(run: Path, tiny: Path, tmp_path: Path) -> None:
    answer = steer("report", run, "--html", tmp_path / "a.html", "--png", tmp_path / "a.png")
    assert answer.exit_code == 0, answer.output
    assert answer.stderr.count("flatout: wrote ") == 2
    assert (tmp_path / "a.html").stat().st_size > 10_000 and (tmp_path / "a.png").is_file()
    assert json.loads(steer("report", run, "--json").stdout)["version"] == 1
    given = ("apply", "is the sky blue ?", "--model", tiny / "model", "--run", run, "--device", "cpu")
    answer = steer(*given, "--max-new-tokens", 3)
    assert [line.split()[0] for line in answer.stdout.splitlines() if line] == [
        "prompt",
        "unsteered",
        "steered",
    ]
    (example,) = json.loads(steer(*given, "--max-new-tokens", 3, "--json").stdout)["examples"]
    assert example["prompt"] == "is the sky blue ?"


def test_what_cannot_be_done_is_one_line(tiny: Path, run: Path, tmp_path: Path) -> None:
    given = ("--model", tiny / "model", "--questions", tiny / "questions.jsonl", "--out", tmp_path / "r")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "positive": "b", "negative": "c"}\n{"prompt": "a"\n')
    assert "broken.jsonl:2 is not JSON" in refused("search", *given, "--questions", broken)
    broken.write_text('{"prompt": "a", "positive": "b", "negative": "c"}\n{"prompt": "a"}\n')
    assert "broken.jsonl:2: 'positive' is missing" in refused("search", *given, "--questions", broken)
    bare = tmp_path / "bare"
    shutil.copytree(tiny / "model", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "has no tokenizer" in refused("search", *given, "--model", bare)
    assert "no model folder at" in refused("fit", broken, "--model", tmp_path / "absent", "--out", tmp_path)
    assert "no method 'caa'" in refused("search", *given, "--method", "caa")
    assert "no questions is given" in refused("search", "--model", tiny / "model")
    assert "is not a range" in refused("search", *given, "--strength", "high")
    assert "cannot be read at 'x'" in refused("search", *given, "--layers", "1,x")
    assert "SQLite locks" in refused("search", *given, "--device", "cpu", "--storage", "sqlite:///a.db")
    assert "has seed=0, but 5 is given" in refused("search", run, "--seed", 5)
    assert "a study of flatout steer is needed" in refused("report", tmp_path)
    assert "either --run or --vectors" in refused("apply", "is", "--model", tiny / "model")
    applied = ("apply", "is the sky", "--model", tiny / "model", "--run", run, "--device", "cpu")
    assert "a prompt of 3 tokens and 126 more exceed the model's 128" in refused(
        *applied, "--max-new-tokens", 126
    )
    assert "finite strength" in refused(*applied, "--strength", "nan")
    assert "is not a lowest and a highest number" in refused("search", *given, "--strength", "0:inf")
    assert "--max-new-tokens 0" in refused("apply", "is", "--model", tiny / "model", "--max-new-tokens", 0)


@pytest.mark.parametrize("scheme", ["grpc://localhost:1"])
def test_a_storage_that_does_not_answer_is_one_line(scheme: str, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="grpc is not installed")
    given = ("--model", tiny / "model", "--questions", tiny / "questions.jsonl", "--out", tmp_path / "r")
    assert "cannot be reached" in refused("search", *given, *BRIEF, "--storage", scheme)
