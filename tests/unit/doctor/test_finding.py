from __future__ import annotations

import dataclasses
import json

import pytest

from flatout.doctor.finding import Ceiling, Finding, Sight
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
