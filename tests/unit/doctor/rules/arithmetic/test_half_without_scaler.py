from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.arithmetic.half_without_scaler import detect
from flatout.measure.evidence import Precision


def job(made, *, scales=False, backwards=1, **changes):
    precision = Precision(
        parameter_dtypes=("float32",),
        autocast="float16",
        tf32_matmul=None,
        bf16_supported=None,
        scales_loss=scales,
    )
    steps = tuple(dataclasses.replace(step, num_backwards=backwards) for step in made.steps())
    call = made.module_call(**{"autocast": "float16", **changes})
    return made.evidence(precision=precision, steps=steps, module_calls=(call,))


def test_fires_at_the_call_and_costs_no_time(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place.line, finding.share, finding.ceiling) == ("FO408", 40, None, None)


@pytest.mark.parametrize(
    "change",
    [{"scales": True}, {"scales": None}, {"backwards": 0}, {"autocast": "bfloat16"}, {"training": False}],
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
