from __future__ import annotations

import pytest

from flatout.doctor.rules.arithmetic.grad_enabled_inference import detect


def job(made, *arms, **changes):
    call = made.module_call(**{"module": "Teacher", "training": False, "unused_gradients": True, **changes})
    return made.evidence(module_calls=(call,), counterfactuals=arms)


def test_fires_at_the_call(made):
    (finding,) = detect(job(made, made.counterfactual("no-grad", 1.4, line=40)))
    assert (finding.code, finding.place.line) == ("FO405", 40)
    assert finding.share == pytest.approx(0.3)
    assert finding.ceiling.speedup == pytest.approx(1.4)


@pytest.mark.parametrize("change", [{"unused_gradients": False}, {"host_s": 0.001}, {"host_s": None}])
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []


def test_an_arm_of_another_line_proves_nothing(made):
    (finding,) = detect(job(made, made.counterfactual("no-grad", 1.4, line=50)))
    assert finding.ceiling is None
