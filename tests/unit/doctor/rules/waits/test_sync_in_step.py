from __future__ import annotations

import pytest

from flatout.doctor.rules.waits.sync_in_step import detect


def sync(made, *, line=60, calls=1.0, device="cuda", via=None, op="item"):
    return made.site("sync", line=line, op=op, calls_per_step=calls, device=device, via=via)


def syncing(made, *sites, gap_s=0.04, num_syncs=1.0, device="cuda", arms=()):
    return made.evidence(
        device=device,
        sites=sites or (sync(made),),
        kernels=made.kernels(sync_gap_s=gap_s, num_syncs=num_syncs),
        counterfactuals=arms,
    )


def test_fires_at_the_line_that_waits(made):
    (finding,) = detect(syncing(made, arms=(made.counterfactual("reads-free", 1.1),)))
    assert (finding.code, finding.name) == ("FO202", "sync-in-step")
    assert finding.place.line == 60
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling.speedup == pytest.approx(1.1)


def test_reads_that_were_made_free_without_a_gain_cost_nothing(made):
    assert detect(syncing(made, arms=(made.counterfactual("reads-free", 0.996),))) == []


@pytest.mark.parametrize(("gap_s", "fires"), [(0.0101, True), (0.0099, False)])
def test_the_gap_must_matter(made, gap_s, fires):
    assert bool(detect(syncing(made, gap_s=gap_s))) == fires


@pytest.mark.parametrize(("calls", "fires"), [(1.0, True), (0.5, False)])
def test_now_and_then_is_not_every_step(made, calls, fires):
    assert bool(detect(syncing(made, sync(made, calls=calls)))) == fires


def test_lines_share_the_gap_by_their_waits(made):
    job = syncing(made, sync(made, line=60, calls=3.0), sync(made, line=61, calls=1.0), num_syncs=4.0)
    assert {finding.place.line: finding.share for finding in detect(job)} == {
        60: pytest.approx(0.15),
        61: pytest.approx(0.05),
    }


def test_waits_of_others_keep_their_part_of_the_gap(made):
    (finding,) = detect(syncing(made, num_syncs=4.0))
    assert finding.share == pytest.approx(0.05)
    assert detect(syncing(made, num_syncs=40.0)) == []


def test_a_wait_inside_a_library_is_the_users_line(made):
    assert detect(syncing(made, sync(made, via="torch/nn/modules/transformer.py:512")))


@pytest.mark.parametrize(
    "via", ["torch/optim/adamw.py:60", "torch/amp/grad_scaler.py:352", "torch\\optim\\adam.py:1"]
)
def test_optimizers_and_scalers_are_not_the_users(made, via):
    assert detect(syncing(made, sync(made, via=via))) == []


def test_look_alikes(made):
    assert detect(syncing(made, sync(made, device="cpu"))) == []
    assert detect(syncing(made, device="cpu")) == []
    assert detect(syncing(made, gap_s=None)) == []
    assert detect(made.evidence(device="cuda", sites=(sync(made),))) == []
    assert detect(syncing(made, made.site("copy", device="cuda"))) == []
