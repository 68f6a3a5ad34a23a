"""How long trials are, and how many run at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.tuner.search.plan import at_once, length_of, plan_for, plan_of, seconds_for, steps_of
from tests.unit.tuner.test_treatment import LOADER, evidence, on_gpu
from tests.unit.tuner.test_verdict import trial


def test_as_many_trials_run_at_once_as_a_gpu_has_room_for() -> None:
    known = on_gpu()
    assert known.gpu is not None
    big = replace(known, gpu=replace(known.gpu, memory_bytes=80 << 30), host=replace(known.host, cores=16.0))
    assert at_once(big, [replace(trial(), peak_bytes=10 << 30)]) == 5
    assert at_once(big, [replace(trial(), peak_bytes=1 << 20)]) == 8  # two cores each
    assert at_once(big, [replace(trial(), peak_bytes=60 << 30)]) == 1
    assert at_once(evidence(), [trial()]) == 1  # on a CPU they are slower beside each other


def test_trials_are_as_long_as_their_steps_need() -> None:
    assert plan_of(0.001).block_steps == 50
    assert (
        plan_of(5.0).num_steps == plan_of(0.6).num_steps == 7
        and plan_of(5.0).limit_s > 5 * plan_of(5.0).num_steps
    )


def test_a_job_that_waits_for_workers_is_tried_for_longer_than_their_queue_lasts() -> None:
    waiting = evidence(loaders=(replace(LOADER, num_workers=8),))
    steps = tuple(replace(step, phases_s={**step.phases_s, "wait": 0.0}) for step in waiting.steps)
    plan = plan_for(replace(waiting, steps=steps))
    assert plan == replace(plan_of(0.1, epoch_steps=10), seen_steps=1)
    assert plan_for(waiting) == plan.past_queue(8) != plan


def test_a_short_job_is_tried_with_as_many_steps_as_it_has() -> None:
    assert plan_of(0.02).num_steps == plan_of(0.02, most_steps=1000).num_steps == 121
    short = plan_of(0.02, most_steps=60)
    assert (short.warmup, short.blocks, short.block_steps, short.num_steps) == (12, 5, 9, 58)
    assert plan_of(0.02, most_steps=10).num_steps == 14  # the fewest; the first run then says what is missing
    whole = evidence(job=replace(evidence().job, ended="finished"))
    assert length_of(whole) == 1 and length_of(evidence()) is None


def test_blocks_of_more_arms_take_longer() -> None:
    assert seconds_for(4, 0.1) == pytest.approx(2 * seconds_for(2, 0.1))


def test_an_epoch_has_the_batches_of_the_loader_that_trains() -> None:
    assert steps_of(evidence()) == 10
    step = replace(evidence().steps[0], num_batches=2)  # accumulated
    assert steps_of(evidence(steps=(step,))) == 5
    assert steps_of(evidence(loaders=(replace(LOADER, num_batches=None),))) is None
