from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from flatout.doctor.finding import Ceiling, Finding, Sight, by_argument
from flatout.ground.codec import decode, encode
from flatout.measure.evidence import Place

FINDING = Finding(
    code="FO302",
    name="row-indexing-in-loop",
    place=Place(file="model.py", line=61, function="Model.forward"),
    message="512 rows are indexed here per step",
    evidence=("512 calls", "0.4 s"),
    share=0.5,
    ceiling=Ceiling(
        step_s=0.5,
        speedup=2.0,
        speedup_low=1.9,
        speedup_high=2.1,
        kind="knock-out",
        arm="knock-out model.py:61",
    ),
    fix="gather",
    safety="reordered",
    also=(Sight(code="FO301", name="tensor-created-in-loop", place=None, share=0.1),),
)


@pytest.mark.parametrize(
    "finding", [FINDING, dataclasses.replace(FINDING, place=None, share=None, ceiling=None)]
)
def test_a_finding_survives_json(finding):
    assert decode(Finding, json.loads(json.dumps(encode(finding)))) == finding


def test_a_finding_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FINDING.share = 1.0


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
    job = dataclasses.replace(evidence, job=dataclasses.replace(evidence.job, framework=framework))
    said = by_argument(
        job,
        "run this under autocast",
        transformers="TrainingArguments(bf16=True)",
        lightning='Trainer(precision="bf16-mixed")',
    )
    assert said == fix


def test_a_framework_without_such_an_argument_leaves_the_fix_as_it_is(made: Any) -> None:
    evidence = made.evidence()
    job = dataclasses.replace(evidence, job=dataclasses.replace(evidence.job, framework="lightning"))
    assert by_argument(job, "the fix", transformers="TrainingArguments(tf32=True)") == "the fix"
