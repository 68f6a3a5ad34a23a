from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.weights_copied_in_loop import detect


def job(made, *arms, **changes):
    fields = {"op": "copy_", "via": "torch/nn/modules/module.py:2400", "bytes_per_step": 2.0**20, **changes}
    return made.evidence(sites=(made.site("weights", **fields),), counterfactuals=arms)


def test_fires_at_the_line_that_loads(made):
    (finding,) = detect(job(made, made.counterfactual("knock-out", 1.5, line=30)))
    assert (finding.code, finding.place.line) == ("FO310", 30)
    assert finding.share == pytest.approx(0.1)
    assert finding.ceiling.speedup == pytest.approx(1.5)


@pytest.mark.parametrize("change", [{"calls_per_step": 4.0}, {"host_s": 0.001}])
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
