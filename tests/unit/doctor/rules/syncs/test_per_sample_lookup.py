from __future__ import annotations

import pytest

from flatout.doctor.rules.syncs.per_sample_lookup import detect


def job(made, *arms, reads="item", **changes):
    sites = (made.site("sync", op="nonzero", **changes), made.site("sync", op=reads, **changes))
    return made.evidence(sites=sites, counterfactuals=arms)


def test_fires_once_for_search_and_read(made):
    (finding,) = detect(job(made, made.counterfactual("knock-out", 1.5, line=30)))
    assert (finding.code, finding.place.line) == ("FO221", 30)
    assert "searched 64 times per step" in finding.message
    assert finding.share == pytest.approx(0.2)


@pytest.mark.parametrize(
    "change", [{"reads": "__bool__"}, {"calls_per_step": 7.0}, {"host_s": 0.001}, {"via": "lib.py:3"}]
)
def test_look_alikes(made, change):
    """Rows that are listed and not read one by one, as experts list theirs, are no lookup."""
    assert detect(job(made, **change)) == []
