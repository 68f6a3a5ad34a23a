from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loading.concatenating_collate import JOINING, detect


def collating(made, *calls, collate_s=0.02, wait_share=0.25, cached=1.4, **changes):
    fields = {"collate_s": made.spread(collate_s), "fetch_s": made.spread(0.005), "calls": calls, **changes}
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(made.loader(**fields),),
        counterfactuals=(made.counterfactual("cached", cached),),
    )


def test_fires_at_the_joining_line(made):
    (finding,) = detect(collating(made, made.call("numpy.concatenate", calls_per_batch=32.0)))
    assert (finding.code, finding.name) == ("FO103", "concatenating-collate")
    assert finding.place.line == 20
    assert finding.share == pytest.approx(0.2)
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("cached", pytest.approx(1.25))  # 20 % of it


def test_cached_batches_bound_the_ceiling(made):
    (finding,) = detect(collating(made, made.call("numpy.pad", calls_per_batch=32.0), cached=1.1))
    assert finding.ceiling.speedup == pytest.approx(1.1)


def test_a_knock_out_of_the_joining_lines_comes_first(made):
    job = collating(made, made.call("numpy.pad", calls_per_batch=32.0))
    knocked_out = made.counterfactual("knock-out", 1.15, line=19, last_line=21)
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, knocked_out)))
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("knock-out", pytest.approx(1.15))


def test_a_loader_measured_to_cost_nothing_is_left_alone(made):
    assert detect(collating(made, made.call("numpy.pad", calls_per_batch=32.0), cached=1.0)) == []


@pytest.mark.parametrize("function", sorted(JOINING))
@pytest.mark.parametrize(("calls", "fires"), [(16.0, True), (15.0, False)])
def test_half_a_call_per_sample_is_enough(made, function, calls, fires):
    assert bool(detect(collating(made, made.call(function, calls_per_batch=calls)))) == fires


@pytest.mark.parametrize(("calls", "fires"), [(8.0, True), (7.0, False)])
def test_small_batches_need_eight_calls(made, calls, fires):
    job = collating(made, made.call("torch.cat", calls_per_batch=calls), batch_size=8)
    assert bool(detect(job)) == fires


def test_functions_of_one_line_are_one_finding(made):
    calls = (
        made.call("numpy.concatenate", calls_per_batch=12.0),
        made.call("numpy.pad", calls_per_batch=12.0),
    )
    (finding,) = detect(collating(made, *calls))
    assert "numpy.concatenate and numpy.pad 24 times" in finding.message


def test_two_guilty_lines_share_the_time(made):
    calls = (
        made.call("numpy.pad", calls_per_batch=32.0, line=20),
        made.call("numpy.concatenate", calls_per_batch=96.0, line=21),
    )
    findings = detect(collating(made, *calls))
    assert {finding.place.line: finding.share for finding in findings} == {
        20: pytest.approx(0.05),
        21: pytest.approx(0.15),
    }


@pytest.mark.parametrize(
    "call",
    [
        {"function": "numpy.stack", "calls_per_batch": 32.0},
        {"function": "torch.tensor", "calls_per_batch": 32.0},
        {"function": "numpy.concatenate", "calls_per_batch": 3.0},
        {"function": "numpy.concatenate", "calls_per_batch": 64.0, "in_collate": False},
    ],
)
def test_look_alikes(made, call):
    function = call.pop("function")
    assert detect(collating(made, made.call(function, **call))) == []


@pytest.mark.parametrize(("collate_s", "fires"), [(0.0051, True), (0.0049, False)])
def test_collating_must_matter_in_the_training_process(made, collate_s, fires):
    job = collating(made, made.call("numpy.pad", calls_per_batch=32.0), collate_s=collate_s)
    assert bool(detect(job)) == fires


@pytest.mark.parametrize(
    ("wait_share", "collate_s", "fires"), [(0.06, 0.02, True), (0.04, 0.02, False), (0.06, 0.001, False)]
)
def test_in_workers_the_step_must_wait_for_it(made, wait_share, collate_s, fires):
    job = collating(
        made,
        made.call("numpy.pad", calls_per_batch=32.0),
        num_workers=2,
        wait_share=wait_share,
        collate_s=collate_s,
    )
    findings = detect(job)
    assert bool(findings) == fires
    if fires:
        assert findings[0].share == pytest.approx(0.06 * 0.8)


def test_a_loader_that_does_not_train_is_left_alone(made):
    assert detect(collating(made, made.call("numpy.pad", calls_per_batch=32.0), trains=False)) == []
