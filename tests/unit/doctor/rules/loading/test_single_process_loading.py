from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loading.single_process_loading import detect
from flatout.ground.units import show_seconds
from flatout.measure.evidence import Host, Rank


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
    assert any("depends on its index alone" in figure for figure in finding.evidence)
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("cached", pytest.approx(1.4))
    assert "num_workers=2" in finding.fix


def test_a_run_with_workers_is_the_ceiling_and_the_advice(made):
    job = slow_loading(made, wait_share=0.6)
    workers = made.counterfactual("workers", 1.3, value=3.0)
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, workers)))
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("workers", pytest.approx(1.3))
    assert "num_workers=3 " in finding.fix
    useless = made.counterfactual("workers", 1.0, value=3.0)
    assert detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, useless))) == []


def test_workers_that_gain_prove_it_where_cached_batches_cannot_tell(made):
    """Seen on a crowded machine: cached 1.49x [0.99, 2.24], one worker 3.21x [2.14, 4.82], a wait of 40 %."""
    job = slow_loading(made, wait_share=0.4, speedup=1.49, width=0.5)
    assert detect(job) == []
    workers = made.counterfactual("workers", 3.21, value=1.0, width=0.9)
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, workers)))
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("workers", pytest.approx(1 / 0.6))
    refuted = made.counterfactual("cached", 1.0)
    assert detect(dataclasses.replace(job, counterfactuals=(refuted, workers))) == []


def test_no_more_is_promised_than_the_wait_that_was_seen(made):
    (finding,) = detect(slow_loading(made, wait_share=0.16, speedup=1.61))
    assert finding.ceiling.speedup == pytest.approx(1 / 0.84)


def test_a_few_long_waits_of_a_busy_machine_prove_nothing(made):
    """Seen on a crowded machine: 91 % of a short run, a hundred times what making the batches took."""
    waits = dataclasses.replace(made.spread(0.09), median_s=0.001)
    job = slow_loading(made, wait_share=0.9, wait_s=waits)
    assert detect(dataclasses.replace(job, counterfactuals=())) == []
    assert [finding.ceiling.kind for finding in detect(job)] == ["cached"]  # steps without them prove it
    usual = slow_loading(made, wait_share=0.9, wait_s=made.spread(0.09))
    assert [finding.ceiling for finding in detect(dataclasses.replace(usual, counterfactuals=()))] == [None]


@pytest.mark.parametrize("cores", [2.0, 1.9])
def test_needs_a_second_core(made, cores):
    assert bool(detect(slow_loading(made, cores=cores))) == (cores >= 2)


@pytest.mark.parametrize(("wait_share", "fires"), [(0.101, True), (0.099, False)])
def test_the_wait_must_matter(made, wait_share, fires):
    assert bool(detect(slow_loading(made, wait_share=wait_share))) == fires


@pytest.mark.parametrize(("speedup", "fires"), [(1.08, True), (1.06, False)])
def test_the_whole_interval_must_lie_above_no_gain(made, speedup, fires):
    assert bool(detect(slow_loading(made, speedup=speedup))) == fires


def test_a_wait_that_was_not_tried_without_has_no_ceiling(made):
    job = made.evidence(steps=made.steps(wait_share=0.5), loaders=(made.loader(),))
    (finding,) = detect(job)
    assert (finding.share, finding.ceiling) == (pytest.approx(0.5), None)


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


@pytest.mark.parametrize(
    ("cores", "speedup", "workers", "hides"),
    [
        (2.0, 1.4, 1, True),  # one worker loads while the other core computes
        (2.0, 30.0, 2, False),  # the training process only waits: its core makes batches too
        (16.0, 1.4, 2, True),
        (16.0, 5.5, 6, True),
        (64.0, 30.0, 31, True),
        (16.0, 30.0, 16, False),
    ],
)
def test_as_many_workers_as_hide_the_loading_and_no_more_than_cores(made, cores, speedup, workers, hides):
    (finding,) = detect(slow_loading(made, cores=cores, speedup=speedup, wait_share=0.8))
    assert f"num_workers={workers} " in finding.fix
    assert ("at best" not in finding.fix) is hides


def test_what_workers_alone_reach_is_the_loading_shared_among_them(made):
    job = slow_loading(made, cores=2.0, speedup=30.0)
    (finding,) = detect(job)
    cached = job.counterfactual("cached")
    best_s = (cached.baseline_step_s - cached.step_s) / 2
    assert f"reaches {show_seconds(best_s)} at best" in finding.fix


def test_ranks_share_the_cores_of_their_host(made):
    job = slow_loading(made, cores=8.0, speedup=30.0)

    def spread_over(*hosts):
        ranks = (
            Rank(rank=rank, step_s=None, phases_s={}, ended="measured", host=host)
            for rank, host in enumerate(hosts)
        )
        return detect(dataclasses.replace(job, ranks=tuple(ranks)))

    for hosts in (["a"] * 4, ["a"] * 4 + ["b"] * 4):
        (finding,) = spread_over(*hosts)
        assert "num_workers=2 " in finding.fix
    assert spread_over(*["a"] * 8) == []


def test_a_batch_of_one_sample_cannot_be_indexed_at_once(made):
    loader = made.loader(batch_size=1, fetch_s=made.spread(1e-5), collate_s=made.spread(1e-5))
    (finding,) = detect(dataclasses.replace(slow_loading(made), loaders=(loader,)))
    assert "dataset[indices]" not in finding.fix
    assert "more than one sample per batch" in finding.fix


@pytest.mark.parametrize("fetch_s", [0.02, 1e-5])
def test_workers_of_a_stream_need_shares_of_their_own(made, fetch_s):
    loader = made.loader(streams=True, fetch_s=made.spread(fetch_s), collate_s=made.spread(1e-5))
    (finding,) = detect(dataclasses.replace(slow_loading(made), loaders=(loader,)))
    assert finding.safety == "lossy"
    assert ("get_worker_info" in finding.fix) is (fetch_s > 1e-3)
    assert "dataset[indices]" not in finding.fix


def test_at_least_one_worker_is_advised_whatever_the_interval_says(made):
    job = slow_loading(made, speedup=1.4)
    cached = dataclasses.replace(job.counterfactual("cached"), speedup_high=1.06)
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(cached,)))
    assert "num_workers=2 " in finding.fix
