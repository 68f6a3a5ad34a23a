from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.doctor import ceilings
from flatout.measure.evidence import ArmNotRun, Episode, StackPath, Stacks

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


def test_an_arm_at_the_line_is_the_ceiling(made):
    arm = made.counterfactual("knock-out", 4.0, line=30, last_line=33)
    job = made.evidence(counterfactuals=(arm,))
    ceiling = ceilings.prove(job, ("knock-out",), place=made.place(32)).ceiling
    assert (ceiling.source, ceiling.kind, ceiling.arm) == ("measured", "knock-out", arm.label)
    assert (ceiling.speedup, ceiling.step_s) == (pytest.approx(4.0), pytest.approx(0.025))
    assert (ceiling.speedup_low, ceiling.speedup_high) == (pytest.approx(3.98), pytest.approx(4.02))
    elsewhere = ceilings.prove(job, ("knock-out",), place=made.place(34))
    assert elsewhere.ceiling is None
    assert elsewhere.reason == "no arm (knock-out) could run here"
    assert ceilings.prove(job, ("knock-out",), place=made.place(32, file="other.py")).ceiling is None


def test_what_a_fix_must_keep_of_the_block_is_added_to_the_step(made):
    arm = made.counterfactual("knock-out", 4.0, line=30, roofline_s=0.025)
    ceiling = ceilings.ceiling_of(arm, made.evidence())
    assert (ceiling.step_s, ceiling.speedup) == (pytest.approx(0.05), pytest.approx(2.0))
    assert ceiling.speedup_low < ceiling.speedup < ceiling.speedup_high < 2.01


def test_the_smallest_block_around_a_line_decides_and_the_first_kind_before_the_second(made):
    function = made.counterfactual("knock-out", 9.0, line=20, last_line=60)
    loop = made.counterfactual("knock-out", 5.0, line=29, last_line=31)
    one_call = made.counterfactual("batched-call", 3.0, line=30)
    job = made.evidence(counterfactuals=(function, loop, one_call))
    place = made.place(30)
    assert ceilings.prove(job, ("knock-out",), place=place).ceiling.speedup == pytest.approx(5.0)
    both = ceilings.prove(job, ("batched-call", "knock-out"), place=place)
    assert both.ceiling.speedup == pytest.approx(3.0)


@pytest.mark.parametrize(("speedup", "width"), [(1.02, 0.02), (0.97, 0.2)])
def test_an_arm_without_a_gain_refutes(made, speedup, width):
    job = made.evidence(counterfactuals=(made.counterfactual("autocast", speedup, width=width),))
    assert ceilings.prove(job, ("autocast",)).refuted


def test_a_gain_inside_the_noise_is_neither_a_ceiling_nor_a_refutation(made):
    job = made.evidence(counterfactuals=(made.counterfactual("autocast", 1.2, width=0.3),))
    proof = ceilings.prove(job, ("autocast",))
    assert proof.ceiling is None
    assert not proof.refuted
    assert "within the noise" in proof.reason


def test_no_more_is_promised_than_was_seen(made):
    """A loader that is waited for during 16 % of the step is not worth 1.61 times the speed."""
    job = made.evidence(counterfactuals=(made.counterfactual("cached", 1.61),))
    ceiling = ceilings.prove(job, ("cached",), observed_share=0.16).ceiling
    assert ceiling.speedup == pytest.approx(1 / 0.84)
    assert ceiling.step_s == pytest.approx(0.084)
    assert ceiling.is_capped and (ceiling.speedup_low, ceiling.speedup_high) == (None, None)
    wide = made.evidence(counterfactuals=(made.counterfactual("cached", 1.61, width=0.5),))
    ceiling = ceilings.prove(wide, ("cached",), observed_share=0.16).ceiling
    assert (ceiling.speedup_low, ceiling.speedup_high) == (pytest.approx(1.11), pytest.approx(1 / 0.84))
    assert ceilings.prove(job, ("cached",), observed_share=0.5).ceiling.speedup == pytest.approx(1.61)


def test_an_arm_on_cached_batches_leaves_the_loader_as_it_is(made):
    cached = made.counterfactual("cached", 2.0)
    arm = made.counterfactual("knock-out", 5.0, line=30, baseline="cached", baseline_step_s=0.05, step_s=0.01)
    ceiling = ceilings.ceiling_of(arm, made.evidence(counterfactuals=(cached, arm)))
    assert (ceiling.step_s, ceiling.speedup) == (pytest.approx(0.06), pytest.approx(0.1 / 0.06))
    free = made.counterfactual("cached", 1.0)
    assert ceilings.ceiling_of(arm, made.evidence(counterfactuals=(free, arm))).speedup == pytest.approx(5.0)
    unclear = dataclasses.replace(free, speedup_low=0.8, speedup_high=1.3)
    evidence = made.evidence(counterfactuals=(unclear, arm))
    wait_s = evidence.phase_s("wait")
    assert wait_s > 0  # where the arm cannot tell, it is what a step was seen to wait
    assert ceilings.ceiling_of(arm, evidence).speedup == pytest.approx((0.05 + wait_s) / (0.01 + wait_s))
    on_one = dataclasses.replace(arm, baseline="one-batch")
    assert ceilings.ceiling_of(on_one, evidence).speedup == pytest.approx(5.0)


def test_an_arm_that_did_not_run_says_why(made):
    left_out = ArmNotRun(
        kind="knock-out",
        label="knock-out train.py:29",
        reason="writes to a file",
        place=made.place(29),
        last_line=31,
    )
    job = made.evidence(arms_not_run=(left_out,))
    proof = ceilings.prove(job, ("knock-out",), place=made.place(30))
    assert proof.reason == "knock-out train.py:29: writes to a file"
    assert "writes" not in ceilings.prove(job, ("knock-out",), place=made.place(50)).reason


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
    ceiling = ceilings.ceiling_of(made.counterfactual("cached", 2.0), evidence)
    assert ceilings.for_the_job(evidence, ceiling).job_speedup == pytest.approx(1 / 0.75)


def test_a_ceiling_of_the_job_alone_leaves_the_step_as_it_is(made):
    ceiling = ceilings.without_episode(made.evidence(), 0.8)
    assert (ceiling.speedup, ceiling.job_speedup) == (1.0, pytest.approx(5.0))
    assert ceilings.for_the_job(made.evidence(), ceiling) == ceiling


def test_a_line_in_a_loop_is_judged_with_its_loop(made):
    """One creation of a thousand is dear only with the loop that repeats it, and the fix takes both away."""
    line = made.counterfactual("knock-out", 0.9, line=31)
    loop = made.counterfactual("knock-out", 8.0, line=29, last_line=33)
    function = made.counterfactual("knock-out", 9.0, line=20, last_line=40)
    stacks = Stacks(num_steps=1, samples_by_phase={}, paths=(), loops={"train.py:31": (5, 29)})
    job = made.evidence(counterfactuals=(line, loop, function), stacks=stacks)
    assert ceilings.prove(job, ("knock-out",), place=made.place(31)).ceiling.arm == loop.label
    alone = dataclasses.replace(job, counterfactuals=(line,))
    assert ceilings.prove(alone, ("knock-out",), place=made.place(31)).refuted


def test_a_line_of_a_function_whose_call_was_left_out_is_gone_with_it(made):
    call = made.place(54, file="model.py", function="Model.forward")
    line = made.place(75, file="model.py", function="Model.build")
    path = StackPath(phase="forward", places=(made.place(9), call, line), samples=9)
    stacks = Stacks(num_steps=1, samples_by_phase={}, paths=(path,))
    without_call = made.counterfactual("knock-out", 2.3, line=54, place=call)
    forward = made.counterfactual(
        "knock-out", 9.0, line=45, last_line=59, place=dataclasses.replace(call, line=45)
    )
    job = made.evidence(counterfactuals=(without_call, forward), stacks=stacks)
    assert ceilings.prove(job, ("knock-out",), place=line).ceiling.speedup == pytest.approx(2.3)
    whole = dataclasses.replace(job, counterfactuals=(forward,))
    assert ceilings.prove(whole, ("knock-out",), place=line).ceiling is None
    noisy = made.counterfactual("knock-out", 1.0, line=70, last_line=80, place=line, width=0.5)
    both = dataclasses.replace(job, counterfactuals=(without_call, noisy))
    assert ceilings.prove(both, ("knock-out",), place=line).ceiling.speedup == pytest.approx(2.3)
    sure = dataclasses.replace(noisy, speedup_low=0.99, speedup_high=1.01)
    costs_nothing = dataclasses.replace(job, counterfactuals=(without_call, sure))
    assert ceilings.prove(costs_nothing, ("knock-out",), place=line).refuted


def test_an_arm_that_leaves_a_gain_open_does_not_refute_what_a_later_one_proves(made):
    """More workers, tried on a busy machine, tell nothing; cached batches show that the loader costs time."""
    workers = made.counterfactual("workers", 0.94, width=0.6)
    cached = made.counterfactual("cached", 4.8, width=0.5)
    proof = ceilings.prove(made.evidence(counterfactuals=(workers, cached)), ("workers", "cached"))
    assert not proof.refuted and proof.ceiling is None
    assert "within the noise" in proof.reason
    settled = made.counterfactual("workers", 0.94, width=0.05)
    assert ceilings.prove(made.evidence(counterfactuals=(settled, cached)), ("workers", "cached")).refuted


@pytest.mark.parametrize(("kind", "refuted"), [("knock-out", False), ("cached", False), ("autocast", True)])
def test_a_step_that_does_less_and_takes_longer_tells_nothing(made, kind, refuted):
    """One block of steps on a machine whose core another job took meanwhile."""
    slower = made.counterfactual(kind, 0.53, width=0.3, place=made.place(30))
    proof = ceilings.prove(made.evidence(counterfactuals=(slower,)), (kind,), place=made.place(30))
    assert proof.refuted is refuted
    assert refuted or "within the noise" in proof.reason
