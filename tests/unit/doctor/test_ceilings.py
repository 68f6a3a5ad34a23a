from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.doctor import ceilings
from flatout.measure.evidence import Episode

seconds = st.floats(min_value=0, max_value=1e6)


@given(part_s=seconds, whole_s=seconds)
def test_a_share_is_a_part_of_the_whole(part_s, whole_s):
    share = ceilings.share_of(part_s, whole_s)
    assert (share is None) == (whole_s == 0)
    if share is not None:
        assert 0 <= share <= ceilings.MOST
        if part_s < 0.9 * whole_s:
            assert share == pytest.approx(part_s / whole_s)


def test_a_share_of_the_unknown_is_unknown():
    assert ceilings.share_of(None, 1.0) is None
    assert ceilings.share_of(1.0, None) is None


def test_a_computed_ceiling_leaves_the_rest_of_the_step(made):
    ceiling = ceilings.computed_ceiling(made.evidence(), freed_share=0.75)
    assert ceiling.source == "computed"
    assert ceiling.step_s == pytest.approx(0.025)
    assert ceiling.speedup == pytest.approx(4.0)
    assert ceilings.computed_ceiling(made.evidence(steps=()), freed_share=0.75) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture holds no state
@given(freed=st.floats(min_value=-1, max_value=2))
def test_no_ceiling_is_slower_than_the_step_or_free(made, freed):
    ceiling = ceilings.computed_ceiling(made.evidence(), freed_share=freed)
    assert ceiling.speedup >= 1
    assert 0 < ceiling.step_s <= 0.1


def test_a_measured_ceiling_limits_a_computed_one_of_the_loader(made):
    cached = made.counterfactual("cached", 1.25)
    ceiling = ceilings.loading_ceiling(made.evidence(counterfactuals=(cached,)), freed_share=0.5)
    assert (ceiling.source, ceiling.speedup, ceiling.step_s) == ("measured", 1.25, cached.step_s)
    assert (ceiling.speedup_low, ceiling.speedup_high) == (cached.speedup_low, cached.speedup_high)


def test_a_computed_ceiling_below_the_measured_one_stands(made):
    cached = made.counterfactual("cached", 3.0)
    ceiling = ceilings.loading_ceiling(made.evidence(counterfactuals=(cached,)), freed_share=0.5)
    assert (ceiling.source, ceiling.speedup) == ("computed", pytest.approx(2.0))
    assert ceilings.loading_ceiling(made.evidence(), freed_share=0.5).source == "computed"


@pytest.mark.parametrize(
    ("name", "judge"),
    [("cached", ceilings.loading_costs_nothing), ("half", ceilings.rows_cost_nothing)],
)
def test_only_a_narrow_interval_around_one_acquits(made, name, judge):
    assert judge(made.evidence(counterfactuals=(made.counterfactual(name, 1.0),)))
    assert not judge(made.evidence(counterfactuals=(made.counterfactual(name, 1.0, width=0.2),)))
    assert not judge(made.evidence(counterfactuals=(made.counterfactual(name, 1.4),)))
    assert not judge(made.evidence())


def test_the_wait_of_one_loader_is_the_wait_of_the_step(made):
    loader = made.loader(wait_s=made.spread(0.001))
    job = made.evidence(loaders=(loader,), steps=made.steps(wait_share=0.3))
    assert ceilings.wait_share(job, loader) == pytest.approx(0.3)


def test_two_training_loaders_answer_for_their_own_waits(made):
    slow, fast = made.loader(wait_s=made.spread(0.02)), made.loader(wait_s=made.spread(0.001))
    job = made.evidence(loaders=(slow, fast), steps=made.steps(wait_share=0.3))
    assert ceilings.wait_share(job, slow) == pytest.approx(0.2)
    assert ceilings.wait_share(job, fast) == pytest.approx(0.01)


def test_batches_and_rows_per_step(made):
    job = made.evidence(steps=made.steps(num_batches=4, rows=8))
    assert (ceilings.batches_per_step(job), ceilings.rows_per_step(job)) == (4.0, 8.0)
    empty = made.evidence(steps=())
    assert (ceilings.batches_per_step(empty), ceilings.rows_per_step(empty)) == (1.0, None)
    assert ceilings.rows_per_step(made.evidence(steps=made.steps(rows=None))) is None


def test_the_counted_step_is_the_one_that_counting_slowed(made):
    assert ceilings.counted_step_s(made.evidence()) == pytest.approx(0.2)
    real = tuple(step for step in made.steps() if step.arm == "real")
    assert ceilings.counted_step_s(made.evidence(steps=real)) == pytest.approx(0.1)


def test_a_faster_step_gains_the_job_what_amdahl_says(made):
    outside = Episode(
        kind="evaluation", place=None, function=None, seconds=3.0, times=3, num_steps=30, per_step_s=0.1
    )
    evidence = made.evidence(episodes=(outside,))  # of a job of steps of 0.1 s
    assert ceilings.step_share(evidence) == pytest.approx(0.5)
    assert ceilings.job_speedup(evidence, 2.0) == pytest.approx(1 / 0.75)
    assert ceilings.job_speedup(made.evidence(), 2.0) == pytest.approx(2.0)
    assert ceilings.job_speedup(made.evidence(steps=()), 2.0) is None
    ceiling = ceilings.computed_ceiling(evidence, freed_share=0.5)
    assert ceilings.for_the_job(evidence, ceiling).job_speedup == pytest.approx(1 / 0.75)


def test_a_ceiling_of_the_job_alone_leaves_the_step_as_it_is(made):
    ceiling = ceilings.without_episode(made.evidence(), 0.8)
    assert (ceiling.speedup, ceiling.job_speedup) == (1.0, pytest.approx(5.0))
    assert ceilings.for_the_job(made.evidence(), ceiling) == ceiling
