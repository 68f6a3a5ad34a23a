from __future__ import annotations

import pytest

from flatout.doctor.rules.syncs.mask_indexing import detect


def job(made, *arms, device="cuda", sync_gap_s=0.04, **changes):
    fields = {"op": "__getitem__", "device": "cuda", "calls_per_step": 16.0, **changes}
    kernels = made.kernels(sync_gap_s=sync_gap_s, num_syncs=16.0)
    return made.evidence(
        device=device, sites=(made.site("sync", **fields),), kernels=kernels, counterfactuals=arms
    )


def test_fires_where_the_gpu_idles_after_each_mask(made):
    (finding,) = detect(job(made, made.counterfactual("knock-out", 1.5, line=30)))
    assert (finding.code, finding.place.line) == ("FO226", 30)
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling.speedup == pytest.approx(1.5)


@pytest.mark.parametrize(
    "change",
    [{"device": "cpu"}, {"sync_gap_s": 0.001}, {"calls_per_step": 3.0}, {"op": "item"}, {"via": "lib.py:3"}],
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []
