"""The verb: flags and files become settings, an epoch a line, and what cannot be done one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flatout.cli.app import application
from flatout.cli.evolve import describe
from flatout.engines.evolution.training.records import EpochRecord
from tests.support.evolution import save_tiny

COPY = ("--task", "digit-copy", "--task-option", "length=2", "--task-option", "token_ids=true")
BRIEF = ("--population", "8", "--prompts", "2", "--epochs", "2", "--rows", "8", "--sigma", "0.1", "--lr", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def evolve(*arguments: object) -> Result:
    return CliRunner().invoke(application(), ["evolve", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The one line that a command which cannot do its work ends with."""
    answer = evolve(*arguments)
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    assert answer.stderr.startswith("flatout: ") and answer.stderr.count("\n") == 1, answer.stderr
    return answer.stderr


def test_a_run_is_told_on_stderr_and_answered_on_stdout(model: Path, tmp_path: Path) -> None:
    answer = evolve("--model", model, *COPY, *BRIEF, "--out", tmp_path / "run")
    assert answer.exit_code == 0, answer.stderr
    assert "epoch 2 of 2 · reward" in answer.stderr and "of plain inference" in answer.stderr
    assert re.search(r"epoch 1 of 2 .*epoch.* · about \d+ s left\n", answer.stderr)
    assert answer.stdout.startswith("2 epochs in ")
    assert "untrained" in answer.stdout and "rewards.png" in answer.stdout
    again = evolve("--out", tmp_path / "run", "--resume", "--epochs", 3, "--json")
    document = json.loads(again.stdout)
    assert (document["format"], document["epochs"]) == ("flatout-evolution", 3)
    assert document["last"]["epoch"] == 3
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line).get("settings", {}).get("epochs") for line in log] == [
        2,
        None,
        None,
        None,
        3,
        None,
    ]


def test_verify_trains_nothing_and_answers_with_a_table(model: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    answer = evolve("--model", model, *COPY, *BRIEF, *out, "--verify")
    assert answer.exit_code == 0, answer.stderr
    assert "members in one batch" in answer.stdout and "DIFFERS" not in answer.stdout
    again = evolve("--model", model, *COPY, *BRIEF, *out, "--verify", "--json")
    document = json.loads(again.stdout)
    assert document["holds"] is True and len(document["checks"]) == 5
    assert not (tmp_path / "run").exists()


def test_flags_win_over_the_file_and_set_over_flags(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {model}\ntask: digit-copy\ntask_options: {{length: 3, token_ids: true}}\n"
        "population: 8\nprompts: 2\nepochs: 9\nrank: 2\nrows: 8\nevaluate_prompts: 4\n"
    )
    out = tmp_path / "run"
    answer = evolve(
        config, "--epochs", 1, "--rank", 3, "--set", "rank=4", "--task-option", "length=2", "--out", out
    )
    assert answer.exit_code == 0, answer.stderr
    saved = json.loads((out / "checkpoints" / "epoch-000001" / "state.json").read_text())["config"]
    assert (saved["epochs"], saved["rank"], saved["population"]) == (1, 4, 8)
    assert saved["task_options"] == {"length": 2, "token_ids": True}


def test_what_cannot_be_done_is_one_line(model: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    given = ("--model", model, *COPY, *out)
    assert "no model folder at" in refused("--model", tmp_path / "absent", *COPY, *out)
    assert "has no config.json" in refused("--model", tmp_path, *COPY, *out)
    assert "no tokenizer" in refused("--model", model, "--task", "digit-copy", *out)
    assert "no task 'digit-cpy'" in refused("--model", model, "--task", "digit-cpy", *out)
    assert "no option 'lenght'" in refused(*given, "--task-option", "lenght=2")
    assert "odd" in refused(*given, "--population", 7)
    (tmp_path / "list.yaml").write_text("task_options: [length]\n")
    assert "'task_options' is not a table" in refused(
        tmp_path / "list.yaml", *given, "--task-option", "length=2"
    )
    assert "did you mean sigma?" in refused(*given, "--set", "sigm=1")
    assert "is not KEY=VALUE" in refused(*given, "--set", "sigma")
    assert "is not valid YAML" in refused(*given, "--set", "sigma=[")
    assert "no settings file at" in refused(tmp_path / "absent.yaml", *given)
    assert "no model is given" in refused(*COPY, *out)
    assert "no task is given" in refused("--model", model, *out)
    assert "optimizer" in refused(*given, "--optimizer", "lion")
    assert "lr=inf is not finite" in refused(*given, "--set", "lr=.inf")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not empty" in refused("--model", model, *COPY, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_out_that_is_a_file_or_beneath_one_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for out in (tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "run"):
        assert "thesis.txt is a file" in refused("--model", model, *COPY, *BRIEF, "--out", out)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_no_targets_are_one_line(model: Path, tmp_path: Path) -> None:
    given = ("--model", model, *COPY, *BRIEF, "--out", tmp_path / "run")
    assert "targets is empty" in refused(*given, "--set", "targets=[]")
    assert "targets is empty" in refused(*given, "--set", "targets=[]", "--set", "arithmetic=int8")


def test_an_epoch_in_one_line() -> None:
    assert describe(EpochRecord(epoch=0)) == "epoch 0 · n/a"
    assert "nothing to learn" in describe(EpochRecord(epoch=1, statistics={"reward_std": 0.0}))
    whole = EpochRecord(
        epoch=7,
        epochs=40,
        reward_train=0.25,
        reward_heldout=0.5,
        rewards_per_s=100.0,
        tokens_per_s=3200.0,
        plain_share=0.96,
        failed_rows=3,
        elapsed_s=12.0,
    )
    assert describe(whole, pace=("2.5 s per epoch", "about 83 s left")) == (
        "epoch 7 of 40 · reward 0.250 · held out 0.500 · 100 rewards/s · 3200 tokens/s"
        " · 96 % of plain inference · 3 rewards failed · 12.0 s"
        " · 2.5 s per epoch · about 83 s left"
    )
