from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.single_process_loading import detect
from flatout.measure.evidence import Host


def slow_loading(made, *, wait_share=0.3, speedup=1.4, width=0.02, cores=4.0, **changes):
    loader = made.loader(fetch_s=made.spread(0.02), collate_s=made.spread(0.005), **changes)
    return made.evidence(
        host=Host(cores=cores, memory_bytes=None),
        steps=made.steps(wait_share=wait_share),
        loaders=(loader,),
        counterfactuals=(made.counterfactual("cached", speedup, width=width),),
    )


def test_fires_at_the_loader_with_the_measured_ceiling(made):
    (finding,) = detect(slow_loading(made))
    assert (finding.code, finding.name) == ("FO101", "single-process-loading")
    assert finding.place == made.place(10)
    assert finding.share == pytest.approx(0.3)
    assert (finding.ceiling.source, finding.ceiling.speedup) == ("measured", 1.4)
    assert "num_workers=3" in finding.fix


@pytest.mark.parametrize("cores", [2.0, 1.9])
def test_needs_a_second_core(made, cores):
    assert bool(detect(slow_loading(made, cores=cores))) == (cores >= 2)


@pytest.mark.parametrize(("wait_share", "fires"), [(0.101, True), (0.099, False)])
def test_the_wait_must_matter(made, wait_share, fires):
    assert bool(detect(slow_loading(made, wait_share=wait_share))) == fires


@pytest.mark.parametrize(("speedup", "fires"), [(1.08, True), (1.06, False)])
def test_the_whole_interval_must_lie_above_no_gain(made, speedup, fires):
    assert bool(detect(slow_loading(made, speedup=speedup))) == fires


def test_a_wait_that_was_not_tried_without_is_no_proof(made):
    job = made.evidence(steps=made.steps(wait_share=0.5), loaders=(made.loader(),))
    assert detect(job) == []


@pytest.mark.parametrize("changes", [{"num_workers": 2}, {"trains": False}])
def test_workers_and_loaders_that_do_not_train_are_left_alone(made, changes):
    assert detect(slow_loading(made, **changes)) == []


def test_a_host_with_unknown_cores_is_left_alone(made):
    assert detect(slow_loading(made, cores=None)) == []


@pytest.mark.parametrize(("collate_s", "workers"), [(0.0005, False), (0.0015, True)])
def test_workers_are_not_proposed_where_handing_a_batch_over_costs_as_much(made, collate_s, workers):
    job = slow_loading(made)
    loader = made.loader(fetch_s=made.spread(0.0001), collate_s=made.spread(collate_s))
    (finding,) = detect(dataclasses.replace(job, loaders=(loader,)))
    assert ("num_workers=" in finding.fix) is workers
    assert ("dataset[indices]" in finding.fix and "600 µs" in finding.fix) is not workers
