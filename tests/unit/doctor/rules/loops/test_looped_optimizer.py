from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.looped_optimizer import detect


def job(made, *arms, **setup):
    return made.evidence(
        steps=made.steps(optimizer_s=0.03),
        optimizers=(made.optimizer(**{"way": "for-loop", **setup}),),
        counterfactuals=arms,
    )


def test_fires_with_the_fused_arm_first(made):
    arms = (made.counterfactual("foreach-optimizer", 1.1), made.counterfactual("fused-optimizer", 1.3))
    (finding,) = detect(job(made, *arms))
    assert (finding.code, finding.place.line, finding.fix) == ("FO307", 12, "AdamW(..., fused=True)")
    assert finding.ceiling.arm == "fused-optimizer"


def test_an_optimizer_without_a_fused_form_takes_lists(made):
    (finding,) = detect(job(made, made.counterfactual("foreach-optimizer", 1.1), name="Adadelta"))
    assert (finding.fix, finding.ceiling.arm) == ("Adadelta(..., foreach=True)", "foreach-optimizer")


@pytest.mark.parametrize("setup", [{"way": "default"}, {"way": "foreach"}, {"way": None}, {"num_tensors": 3}])
def test_look_alikes(made, setup):
    """A loop over three parameters costs nothing, and torch's own loop on a CPU is not the script's wish."""
    assert detect(job(made, **setup)) == []
