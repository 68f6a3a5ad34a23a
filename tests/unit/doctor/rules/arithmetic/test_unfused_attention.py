from __future__ import annotations

import pytest

from flatout.doctor.rules.arithmetic.unfused_attention import detect


def job(made, *arms, op="attention"):
    sites = (made.site("call", op=op, calls_per_step=6.0), made.site("call", op="attention product", line=28))
    return made.evidence(sites=sites, counterfactuals=arms)


def test_fires_where_one_call_was_measured_to_gain(made):
    (finding,) = detect(job(made, made.counterfactual("fused-attention", 1.4)))
    assert (finding.code, finding.place.line) == ("FO404", 30)
    assert finding.ceiling.speedup == pytest.approx(1.4)


def test_what_was_not_measured_is_not_advised(made):
    assert detect(job(made)) == []
    assert detect(job(made, made.counterfactual("fused-attention", 1.01))) == []
    assert detect(job(made, made.counterfactual("fused-attention", 1.4), op="other")) == []
