from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.many_parameter_groups import detect


def job(made, *arms, optimizer_s=0.02, **setup):
    return made.evidence(
        steps=made.steps(optimizer_s=optimizer_s),
        optimizers=(made.optimizer(**{"num_groups": 465, "num_distinct": 28, **setup}),),
        counterfactuals=arms,
    )


def test_fires_at_the_line_that_makes_the_optimizer(made):
    (finding,) = detect(job(made, made.counterfactual("merged-groups", 1.23)))
    assert (finding.code, finding.place.line) == ("FO306", 12)
    assert "465 parameter groups with 28 different sets of options" in finding.message
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling.speedup == pytest.approx(1.23)


@pytest.mark.parametrize(
    "setup", [{"num_groups": 30}, {"num_groups": 28}, {"way": None}, {"num_groups": 4, "num_distinct": 4}]
)
def test_look_alikes(made, setup):
    assert detect(job(made, **setup)) == []


def test_an_optimizer_that_takes_no_time_is_left_alone(made):
    assert detect(job(made, optimizer_s=0.004)) == []


def test_the_arm_refutes(made):
    assert detect(job(made, made.counterfactual("merged-groups", 1.0))) == []
