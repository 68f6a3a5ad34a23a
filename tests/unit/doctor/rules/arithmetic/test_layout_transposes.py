from __future__ import annotations

import pytest

from flatout.doctor.rules.arithmetic.layout_transposes import detect
from flatout.measure.evidence import Kernel


def job(made, *arms, device="cuda", seconds=0.1):
    turned = Kernel(name="nchwToNhwcKernel<float>", category="other", calls_per_step=8.0, total_s=0.02)
    return made.evidence(
        device=device,
        kernels=made.kernels(by_category_s={"convolution": seconds}, top=(turned,)),
        module_calls=(made.module_call(),),
        counterfactuals=arms,
    )


def test_fires_where_turned_weights_were_measured_to_gain(made):
    (finding,) = detect(job(made, made.counterfactual("channels-last", 1.3)))
    assert (finding.code, finding.place.line) == ("FO407", 40)
    assert finding.share == pytest.approx(0.5)
    assert "nchwToNhwcKernel" in finding.evidence[1]


def test_look_alikes(made):
    arm = made.counterfactual("channels-last", 1.3)
    assert detect(job(made)) == []
    assert detect(job(made, arm, device="cpu")) == []
    assert detect(job(made, arm, seconds=0.01)) == []
    assert detect(job(made, made.counterfactual("channels-last", 1.0))) == []
