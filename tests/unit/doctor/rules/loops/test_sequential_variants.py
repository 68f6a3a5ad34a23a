from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.sequential_variants import detect


def job(made, **changes):
    return made.evidence(
        module_calls=(made.module_call(**{"num_alike": 16, "calls_per_step": 16.0, **changes}),)
    )


def test_fires_with_its_share_and_the_reason_for_no_ceiling(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place.line) == ("FO309", 40)
    assert finding.share == pytest.approx(0.3)
    assert finding.ceiling is None and "stacking" in finding.no_ceiling


@pytest.mark.parametrize(
    "change",
    [{"num_alike": 2}, {"rows": None}, {"has_parameters": False}, {"host_s": 0.01}, {"host_s": None}],
)
def test_look_alikes(made, change):
    """Two critics, losses, and models on parts of a batch are no ensemble."""
    assert detect(job(made, **change)) == []
