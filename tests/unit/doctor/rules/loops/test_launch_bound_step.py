from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.loops.launch_bound_step import detect, explains_launches
from flatout.measure.evidence import Copy, OperatorCalls


def launching(made, *, busy_s=0.02, kernels=None, phases=None, **fields):
    """A step of 100 ms on a GPU whose kernels run for `busy_s` of it; the profiler doubles the step."""
    steps = [
        dataclasses.replace(
            step, phases_s={"forward": 0.04, "backward": 0.04, "optimizer": 0.01, **(phases or {})}
        )
        for step in made.steps()
    ]
    profiled = made.kernels(
        num_kernels=800.0,
        busy_share=busy_s / 0.2,
        gap_s=0.2 - busy_s,
        median_kernel_s=4e-6,
        optimizer="for-loop",
        **(kernels or {}),
    )
    given = {"steps": tuple(steps), "module_calls": (made.module_call(),), "kernels": profiled, **fields}
    return made.evidence(device="cuda", **given)


def test_names_the_model_call_and_measures_the_kernels(made):
    callers = (
        OperatorCalls(caller="Block", place=made.place(12), calls_per_step=96.0),
        OperatorCalls(caller="Adam.step", place=None, calls_per_step=40.0),
    )
    (finding,) = detect(launching(made, operator_calls=callers))
    assert (finding.code, finding.name, finding.place) == ("FO305", "launch-bound-step", made.place(40))
    assert finding.share == pytest.approx(0.09 / 0.1 - 0.2)
    assert finding.ceiling.step_s == pytest.approx(0.1 - 0.07)
    assert finding.ceiling.speedup == pytest.approx(1 / 0.3)
    figures = "\n".join(finding.evidence)
    assert "800 kernels per step, 4.00 µs each" in figures
    assert "the mean gap between two of them is 100 µs" in figures
    assert "Block (train.py:12) 96, Adam.step 40" in figures
    assert "fused=True" in finding.fix


def test_the_share_is_of_the_step_without_the_profiler(made):
    (finding,) = detect(launching(made, busy_s=0.05))
    assert "busy for 50 % of the step" in finding.message


@pytest.mark.parametrize(("busy_s", "fires"), [(0.003, True), (0.06, True), (0.071, False), (0.099, False)])
def test_a_busy_gpu_is_not_waiting_for_launches(made, busy_s, fires):
    assert bool(detect(launching(made, busy_s=busy_s))) == fires


def test_what_the_host_does_outside_the_model_is_not_launching(made):
    elsewhere = {"forward": 0.01, "backward": 0.01, "optimizer": 0.01, "wait": 0.07}
    assert detect(launching(made, phases=elsewhere)) == []


def test_gaps_after_a_wait_are_another_rules(made):
    assert detect(launching(made, kernels={"sync_gap_s": 0.12})) == []


@pytest.mark.parametrize(("transfer_s", "left_s"), [(0.0, 0.06), (0.01, 0.05), (0.05, 0.03)])
def test_copies_that_run_beside_the_launches_stay(made, transfer_s, left_s):
    """The host does not launch while it waits for a copy: that time is no part of its launching."""
    copies = (
        Copy(kind="HtoD pinned", calls_per_step=1.0, total_s=0.03),
        Copy(kind="DtoD", calls_per_step=1.0, total_s=0.05),
    )
    job = launching(made, kernels={"copies": copies}, phases={"transfer": transfer_s})
    assert [finding.ceiling.step_s for finding in detect(job)] == [pytest.approx(left_s)]


def test_a_larger_batch_is_advised_where_half_takes_as_long(made):
    assert "larger batch" not in detect(launching(made))[0].fix
    flat = (made.counterfactual("half", 1.0),)
    assert "larger batch" in detect(launching(made, counterfactuals=flat))[0].fix


def test_without_a_gpu_or_its_kernels_nothing_is_said(made):
    assert detect(dataclasses.replace(launching(made), kernels=None)) == []
    assert detect(launching(made, kernels={}, job=made.evidence().job)) == []


def test_a_line_that_frees_half_as_much_takes_its_place(made):
    (finding,) = detect(launching(made))

    def other(code, *, speedup=None, share=0.02):
        ceiling = None if speedup is None else dataclasses.replace(finding.ceiling, speedup=speedup)
        return dataclasses.replace(finding, code=code, share=share, ceiling=ceiling)

    assert explains_launches(finding, other("FO302"))  # a loop in the model, whatever its share
    assert explains_launches(finding, other("FO207", speedup=2.0))
    assert not explains_launches(finding, other("FO207", speedup=1.2))
    assert not explains_launches(finding, other("FO202"))
    assert not explains_launches(finding, dataclasses.replace(other("FO302"), place=None))
    assert not explains_launches(other("FO302"), finding)


def test_a_job_with_an_idle_gpu_does_not_end_without_findings(made):
    for busy_s in (0.003, 0.015, 0.022):
        assert [finding.name for finding in examine(launching(made, busy_s=busy_s))] == ["launch-bound-step"]
