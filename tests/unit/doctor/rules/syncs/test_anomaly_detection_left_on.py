from __future__ import annotations

import pytest

from flatout.doctor.rules.syncs.anomaly_detection_left_on import detect


def job(made, *arms, kind="call", **changes):
    fields = {"op": "detect_anomaly", "line": 3, "host_s": None, "calls_per_step": 1.0, **changes}
    return made.evidence(sites=(made.site(kind, **fields),), counterfactuals=arms)


def test_fires_at_the_line_that_names_it(made):
    (finding,) = detect(job(made, made.counterfactual("no-anomaly-detection", 4.6)))
    assert (finding.code, finding.place.line) == ("FO225", 3)
    assert finding.ceiling.speedup == pytest.approx(4.6)


def test_without_an_arm_the_reason_is_told(made):
    (finding,) = detect(job(made))
    assert finding.ceiling is None and "no-anomaly-detection" in finding.no_ceiling


def test_look_alikes(made):
    assert detect(job(made, op="checkpoint")) == []
    assert detect(job(made, made.counterfactual("no-anomaly-detection", 1.0))) == []
