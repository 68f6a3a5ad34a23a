"""Names, files and options become tasks; what does not is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.evolution.rewards.rewards import ExactMatch, FormatMatch
from flatout.engines.evolution.tasks.arithmetic import Arithmetic
from flatout.engines.evolution.tasks.countdown import Countdown
from flatout.engines.evolution.tasks.digit_copy import DigitCopy
from flatout.engines.evolution.tasks.find_task import TASKS, task_named
from flatout.engines.evolution.tasks.gsm8k import Gsm8k
from flatout.engines.evolution.tasks.translation import Translation
from flatout.errors import BadInput


@pytest.fixture
def files(tmp_path: Path) -> Path:
    def write(name: str, *fields: str) -> None:
        lines = [json.dumps({field: f"{field} {n}" for field in fields}) for n in range(60)]
        (tmp_path / name).write_text("\n" + "\n".join(lines), encoding="utf-8")

    write("problems.jsonl", "question", "answer", "level")
    write("sentences.jsonl", "source", "target")
    write("other.jsonl", "text", "label")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "broken.jsonl").write_text("\n{\n")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def test_generated_tasks() -> None:
    assert task_named("digit-copy") == DigitCopy()
    assert task_named("arithmetic", digits=3) == Arithmetic(digits=3)
    assert task_named("countdown", num_numbers="3", format_credit="0") == Countdown(
        num_numbers=3, format_credit=0.0
    )
    assert task_named("digit-copy", token_ids="true", length="6") == DigitCopy(token_ids=True, length=6)
    assert set(TASKS) == {"digit-copy", "arithmetic", "countdown", "gsm8k", "translation"}


def test_files_by_their_fields(files: Path) -> None:
    assert isinstance(task_named(files / "problems.jsonl"), Gsm8k)
    task = task_named(str(files / "sentences.jsonl"), reward="exact")
    assert isinstance(task, Translation) and task.reward == ExactMatch()


def test_files_by_name_and_path(files: Path) -> None:
    path = str(files / "problems.jsonl")
    task = task_named("gsm8k", path=path, max_new_tokens="32", reward="format:####")
    assert isinstance(task, Gsm8k) and task.max_new_tokens == 32
    assert task.reward == FormatMatch(pattern="####")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digitcopy", {}, "no task 'digitcopy'.*did you mean digit-copy"),
        ("chess", {}, "known: digit-copy, arithmetic, countdown, gsm8k, translation"),
        ("gsm8k", {}, "needs a file"),
        ("digit-copy", {"size": 3}, "no option 'size'.*known: length, token_ids, first_token_id"),
        ("digit-copy", {"length": "four"}, "length='four' of the task digit-copy is no int"),
        ("digit-copy", {"token_ids": "maybe"}, "neither true nor false"),
        ("gsm8k", {"path": "absent.jsonl"}, "absent.jsonl does not exist"),
        ("gsm8k", {"_train": ()}, "no option '_train'"),
        ("other.jsonl", {}, "other.jsonl:2 has text, label: it fits no task.*question and answer"),
        ("list.jsonl", {}, "list.jsonl:1 has list"),
        ("broken.jsonl", {}, "broken.jsonl:2 is no JSON object"),
        ("empty.jsonl", {}, "empty.jsonl:1 is no JSON object"),
    ],
)
def test_what_names_no_task(files: Path, name: str, options: dict[str, Any], message: str) -> None:
    place = files / name if name.endswith(".jsonl") else name
    with pytest.raises(BadInput, match=message) as caught:
        task_named(place, **options)
    assert "\n" not in str(caught.value)
