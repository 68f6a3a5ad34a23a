from __future__ import annotations

from flatout.doctor.examine import examine
from flatout.doctor.rules.waits.device_round_trip import detect


def job(made, *arms, op="cpu", line=30, sync_gap_s=0.04, calls=2.0):
    sites = (
        made.site("sync", op=op, calls_per_step=calls, device="cuda"),
        made.site("copy", op="to", line=line, calls_per_step=2.0, device="cuda", bytes_per_step=64.0),
    )
    kernels = made.kernels(sync_gap_s=sync_gap_s, num_syncs=2.0)
    return made.evidence(device="cuda", sites=sites, kernels=kernels, counterfactuals=arms)


def test_a_tensor_that_comes_back_is_one_finding(made):
    (finding,) = examine(job(made, made.counterfactual("reads-free", 1.25)))
    assert (finding.code, finding.place.line, finding.ceiling.speedup) == ("FO208", 30, 1.25)
    assert finding.also == ()


def test_look_alikes(made):
    assert detect(job(made, op="item")) == []
    assert detect(job(made, line=33)) == []
    assert detect(job(made, sync_gap_s=0.001)) == []
    assert detect(job(made, calls=0.1)) == []
    assert detect(job(made, made.counterfactual("reads-free", 1.0))) == []
    assert detect(made.evidence()) == []
