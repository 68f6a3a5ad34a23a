from __future__ import annotations

import pytest

from flatout.doctor.rules.syncs.empty_cache_in_loop import detect


def job(made, *arms, device="cuda", **changes):
    fields = {"op": "empty_cache", "device": "cuda", "calls_per_step": 1.0, **changes}
    return made.evidence(device=device, sites=(made.site("call", **fields),), counterfactuals=arms)


def test_fires_with_what_steps_without_the_call_take(made):
    (finding,) = detect(
        job(made, made.counterfactual("no-empty-cache", 2.2), made.counterfactual("knock-out", 1.1, line=30))
    )
    assert (finding.code, finding.place.line, finding.safety) == ("FO223", 30, "exact")
    assert finding.ceiling.speedup == pytest.approx(2.2)
    assert finding.share == pytest.approx(0.1)


@pytest.mark.parametrize(
    "change", [{"device": "cpu"}, {"calls_per_step": 0.01}, {"via": "lib.py:3"}, {"op": "other"}]
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []


def test_a_call_that_costs_nothing_is_refuted(made):
    assert detect(job(made, made.counterfactual("no-empty-cache", 1.01))) == []
