from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatout.doctor.frameworks import by_argument, loader_arguments, made_by

TRAINER = "transformers/trainer.py:812"


@pytest.mark.parametrize(
    ("framework", "fix"),
    [
        (None, "run this under autocast"),
        ("transformers", "pass TrainingArguments(bf16=True)"),
        ("lightning", 'pass Trainer(precision="bf16-mixed")'),
    ],
)
def test_a_fix_is_the_argument_of_the_framework_that_owns_the_loop(
    made: Any, framework: str | None, fix: str
) -> None:
    evidence = made.evidence()
    job = replace(evidence, job=replace(evidence.job, framework=framework))
    said = by_argument(
        job,
        "run this under autocast",
        transformers="TrainingArguments(bf16=True)",
        lightning='Trainer(precision="bf16-mixed")',
    )
    assert said == fix


def test_a_framework_without_such_an_argument_leaves_the_fix_as_it_is(made: Any) -> None:
    evidence = made.evidence()
    job = replace(evidence, job=replace(evidence.job, framework="lightning"))
    assert by_argument(job, "the fix", transformers="TrainingArguments(tf32=True)") == "the fix"


@pytest.mark.parametrize(
    ("via", "words"),
    [
        (None, "give this DataLoader num_workers=2 and persistent_workers=True"),
        (
            TRAINER,
            "give TrainingArguments dataloader_num_workers=2 and dataloader_persistent_workers=True",
        ),
        (
            "sentence_transformers/fit.py:3",
            "give the DataLoader that sentence_transformers makes num_workers=2 and persistent_workers=True",
        ),
    ],
)
def test_the_library_that_makes_a_loader_is_told_by_its_own_arguments(
    made: Any, via: str | None, words: str
) -> None:
    loader = made.loader(via=via)
    assert loader_arguments(loader, num_workers=2, persistent_workers=True) == words


def test_a_loader_of_the_users_own_line_is_made_by_no_library(made: Any) -> None:
    assert made_by(made.loader()) is None
    assert made_by(made.loader(via="lightning/fabric/utilities/data.py:325")) is None
    assert made_by(made.loader(via=TRAINER)) == "transformers"
