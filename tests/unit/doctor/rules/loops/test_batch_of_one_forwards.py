from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loops.batch_of_one_forwards import detect
from flatout.measure.arms.arm import DEPENDS
from flatout.measure.evidence import ArmNotRun


def forwards(made, *, rows_of_step=32, **changes):
    call = made.module_call(**{"rows": 1, "calls_per_step": 32.0, **changes})
    return made.evidence(module_calls=(call,), steps=made.steps(rows=rows_of_step))


def test_fires_at_the_line_that_calls_the_model(made):
    one_call = made.counterfactual("batched-call", 5.0, line=40)
    loop = made.counterfactual("knock-out", 9.0, line=38, last_line=41)
    (finding,) = detect(dataclasses.replace(forwards(made), counterfactuals=(loop, one_call)))
    assert (finding.code, finding.name) == ("FO304", "batch-of-one-forwards")
    assert finding.place.line == 40
    assert finding.share == pytest.approx(0.3)
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("batched-call", pytest.approx(5.0))


def test_calls_that_need_the_one_before_cannot_be_stacked(made):
    """A game: the model's action decides what it sees next."""
    job = forwards(made)
    (call,) = job.module_calls
    refused = ArmNotRun(
        kind="batched-call",
        label="batched-call",
        reason=f"{DEPENDS}, so the calls cannot be one",
        place=call.place,
    )
    (before,), (after,) = detect(job), detect(dataclasses.replace(job, arms_not_run=(refused,)))
    assert before.fix.startswith("stack the samples") and "side by side" in after.fix


@pytest.mark.parametrize(("calls", "fires"), [(8.0, True), (7.0, False)])
def test_eight_calls_make_a_loop(made, calls, fires):
    assert bool(detect(forwards(made, calls_per_step=calls, rows_of_step=8))) == fires


@pytest.mark.parametrize(("host_s", "fires"), [(0.0201, True), (0.0199, False), (None, False)])
def test_the_forwards_must_matter(made, host_s, fires):
    assert bool(detect(forwards(made, host_s=host_s))) == fires


@pytest.mark.parametrize(("calls", "fires"), [(16.0, True), (15.0, False)])
def test_calls_that_are_fewer_than_samples_go_over_time_not_samples(made, calls, fires):
    assert bool(detect(forwards(made, calls_per_step=calls))) == fires


def test_accumulation_over_a_loader_of_single_samples_fires(made):
    assert detect(forwards(made, rows_of_step=1, calls_per_step=16.0))


def test_a_job_without_a_loader_fires(made):
    assert detect(forwards(made, rows_of_step=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 32},
        {"rows": None},
        {"has_parameters": False},
        {"module": "LSTM"},
        {"module": "DecoderGRU"},
        {"module": "RNN"},
    ],
)
def test_look_alikes(made, changes):
    assert detect(forwards(made, **changes)) == []
