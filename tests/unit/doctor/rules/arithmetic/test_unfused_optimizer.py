from __future__ import annotations

import pytest

from flatout.doctor.rules.arithmetic.unfused_optimizer import detect


def job(made, *arms, device="cuda", optimizer_s=0.02, **setup):
    return made.evidence(
        device=device,
        steps=made.steps(optimizer_s=optimizer_s),
        optimizers=(made.optimizer(**{"way": "foreach", **setup}),),
        counterfactuals=arms,
    )


def test_fires_on_a_gpu(made):
    (finding,) = detect(job(made, made.counterfactual("fused-optimizer", 1.15)))
    assert (finding.code, finding.place.line, finding.safety) == ("FO403", 12, "reordered")
    assert finding.ceiling.speedup == pytest.approx(1.15)


@pytest.mark.parametrize(
    "change",
    [{"device": "cpu"}, {"optimizer_s": 0.004}, {"way": "fused"}, {"way": "for-loop"}, {"name": "Adadelta"}],
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
