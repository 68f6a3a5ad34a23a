from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.arithmetic.full_precision_matmul import detect
from flatout.measure.evidence import Precision


def job(made, *arms, device="cuda", seconds=0.08, tf32=False):
    precision = Precision(parameter_dtypes=("float32",), autocast=None, tf32_matmul=tf32, bf16_supported=True)
    return made.evidence(
        device=device,
        precision=precision,
        kernels=made.kernels(matmul_s_by_dtype={"fp32": seconds}),
        module_calls=(made.module_call(),),
        counterfactuals=arms,
    )


def test_fires_where_tf32_was_measured_to_gain(made):
    (finding,) = detect(job(made, made.counterfactual("tf32", 1.6, line=40)))
    assert (finding.code, finding.place.line, finding.safety) == ("FO402", 40, "lossy")
    assert finding.share == pytest.approx(0.4)
    assert finding.ceiling.speedup == pytest.approx(1.6)


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"seconds": 0.01}, {"tf32": True}])
def test_look_alikes(made, change):
    assert detect(job(made, made.counterfactual("tf32", 1.6, line=40), **change)) == []
    assert detect(job(made)) == []


def test_autocast_takes_its_place_at_the_same_call(made):
    arms = [made.counterfactual("tf32", 1.6, line=40), made.counterfactual("autocast", 3.0, line=40)]
    assert [finding.code for finding in examine(job(made, *arms))] == ["FO401"]
