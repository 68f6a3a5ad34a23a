from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.doctor.rules.syncs.hidden_library_sync import detect

VIA = "torch/distributions/distribution.py:71"


def job(made, *more, device="cuda", sync_gap_s=0.04, **changes):
    fields = {"op": "__bool__", "device": "cuda", "calls_per_step": 2.0, "via": VIA, **changes}
    kernels = made.kernels(sync_gap_s=sync_gap_s, num_syncs=4.0)
    return made.evidence(device=device, sites=(made.site("sync", **fields), *more), kernels=kernels)


def test_names_the_librarys_line(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place.line) == ("FO222", 30)
    assert finding.evidence[0] == f"it waits at {VIA}"
    assert finding.share == pytest.approx(0.1)
    assert finding.ceiling is None and "library" in finding.no_ceiling


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cpu"},
        {"sync_gap_s": 0.001},
        {"calls_per_step": 0.1},
        {"via": None},
        {"via": "torch/optim/a.py:3"},
    ],
)
def test_look_alikes(made, change):
    assert detect(job(made, **change)) == []


def test_a_line_that_waits_by_itself_is_sync_in_steps(made):
    assert detect(job(made, made.site("sync", op="item", device="cuda", calls_per_step=1.0))) == []


def test_a_wait_of_the_frameworks_own_loop_is_its_logging(made):
    waiting = job(made, via="transformers/trainer.py:2010")
    in_its_loop = replace(waiting, job=replace(waiting.job, framework="transformers"))
    (finding,) = detect(in_its_loop)
    assert "logging_nan_inf_filter=False" in finding.fix
    elsewhere = replace(job(made), job=in_its_loop.job)
    assert "turns the library's check off" in detect(elsewhere)[0].fix
