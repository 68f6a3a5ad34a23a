from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.tensor_created_in_loop import detect


def creating(made, *sites, **fields):
    return made.evidence(sites=sites or (made.site("create", op="tensor"),), **fields)


def test_fires_at_the_creating_line(made):
    knocked_out = made.counterfactual("knock-out", 10.0, line=28, last_line=31)
    (finding,) = detect(creating(made, counterfactuals=(knocked_out,)))
    assert (finding.code, finding.name) == ("FO301", "tensor-created-in-loop")
    assert finding.place.line == 30
    assert finding.share == pytest.approx(0.1)
    assert finding.ceiling.step_s == pytest.approx(0.01)


@pytest.mark.parametrize(("calls", "fires"), [(10.0, True), (9.5, False)])
def test_ten_creations_make_a_loop(made, calls, fires):
    assert bool(detect(creating(made, made.site("create", calls_per_step=calls)))) == fires


@pytest.mark.parametrize(("host_s", "fires"), [(0.0041, True), (0.0039, False), (None, False)])
def test_the_creations_must_matter(made, host_s, fires):
    assert bool(detect(creating(made, made.site("create", host_s=host_s)))) == fires


def test_operations_of_one_line_are_one_finding(made):
    zeros = made.site("create", op="zeros", calls_per_step=6.0, host_s=0.003)
    ones = made.site("create", op="ones", calls_per_step=6.0, host_s=0.003)
    (finding,) = detect(creating(made, zeros, ones))
    assert finding.share == pytest.approx(0.03)
    assert "12 tensors" in finding.message


def test_what_is_computed_from_the_tensors_alone_goes_with_them(made):
    (finding,) = detect(creating(made, made.site("create", derived_s=0.06)))
    assert finding.share == pytest.approx(0.4)
    assert any("60.0 ms more" in figure for figure in finding.evidence)


def test_cheap_creations_are_not_blamed_for_what_follows(made):
    assert detect(creating(made, made.site("create", host_s=0.0009, derived_s=0.1))) == []


def test_two_lines_are_two_findings(made):
    job = creating(made, made.site("create", line=30), made.site("create", line=31))
    assert sorted(finding.place.line for finding in detect(job)) == [30, 31]


@pytest.mark.parametrize(("busy_share", "share"), [(0.3, 0.1), (0.95, 0.05), (0.99, None), (None, 0.1)])
def test_on_a_gpu_only_idle_time_can_be_won(made, busy_share, share):
    findings = detect(creating(made, device="cuda", kernels=made.kernels(busy_share=busy_share)))
    assert [finding.share for finding in findings] == ([] if share is None else [pytest.approx(share)])


def test_look_alikes(made):
    assert detect(creating(made, made.site("create", via="torch/optim/adam.py:150"))) == []
    assert detect(creating(made, made.site("row"))) == []
    per_sample = made.site("create", place=made.place(5, function="Samples.__getitem__"))
    assert detect(creating(made, per_sample)) == []
    assert detect(creating(made, attributed_step_s=None)) == []
