from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.finding import Finding
from flatout.doctor.rule import rule_by_code
from flatout.doctor.sentences import show_ceiling
from flatout.measure.evidence import Episode, EpisodeKind, Evidence

CODES: dict[EpisodeKind, str] = {
    "evaluation": "FO801",
    "checkpoint": "FO802",
    "epoch-start": "FO803",
    "rollout": "FO804",
    "other": "FO805",
}


def episode(made: Any, kind: EpisodeKind = "evaluation", **changes: Any) -> Episode:
    """Four seconds every ten steps of 0.1 s, so 80 % of the job."""
    fields: dict[str, Any] = {
        "place": made.place(41), "function": "evaluate", "seconds": 12.0, "times": 3, "num_steps": 30,
        "per_step_s": 0.4, "samples": 300,
    }  # fmt: skip
    return Episode(kind=kind, **{**fields, **changes})


def found(evidence: Evidence) -> list[Finding]:
    return [finding for finding in examine(evidence) if finding.code.startswith("FO8")]


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_each_kind_has_its_rule(made: Any, kind: EpisodeKind, code: str) -> None:
    (finding,) = found(made.evidence(episodes=(episode(made, kind),)))
    assert (finding.code, finding.place) == (code, made.place(41))
    assert finding.share == pytest.approx(0.8)
    who = "the loader" if kind == "epoch-start" else "evaluate()"
    assert finding.message.startswith(who) and "80 % of the job" in finding.message
    assert rule_by_code(code).name == finding.name


@pytest.mark.parametrize(("kind", "says"), [("evaluation", False), ("rollout", False), ("other", True)])
def test_mere_calls_of_a_model_have_no_training_to_interrupt(
    made: Any, kind: EpisodeKind, says: bool
) -> None:
    evidence = made.evidence(episodes=(episode(made, kind),))
    calls = dataclasses.replace(evidence, job=dataclasses.replace(evidence.job, anchor="Policy call"))
    assert bool(found(calls)) is says


def test_the_time_outside_is_spread_over_the_steps(made: Any) -> None:
    evidence = made.evidence(episodes=(episode(made),))
    assert evidence.outside_s == pytest.approx(0.4)
    assert evidence.job_share(0.1) == pytest.approx(0.2)


def test_the_ceiling_is_the_jobs(made: Any) -> None:
    (finding,) = found(made.evidence(episodes=(episode(made),)))
    assert finding.ceiling is not None
    assert (finding.ceiling.speedup, finding.ceiling.step_s) == (1.0, pytest.approx(0.1))
    assert finding.ceiling.job_speedup == pytest.approx(5.0)
    assert show_ceiling(finding.ceiling) == "5.00× of the job measured"


@pytest.mark.parametrize(
    "changes",
    [
        {"per_step_s": 0.01},  # 9 % of the job
        {"samples": 2},
        {"per_step_s": None, "num_steps": 0},  # set-up has no steps
        {"kind": "set-up"},
        {"kind": "compilation"},
    ],
)
def test_what_is_small_thin_or_paid_once_is_no_finding(made: Any, changes: dict[str, Any]) -> None:
    assert found(made.evidence(episodes=(episode(made, **changes),))) == []


def test_what_was_seen_once_has_a_share_of_the_observed_time_and_no_ceiling(made: Any) -> None:
    once = episode(made, seconds=4.0, times=1, num_steps=10, per_step_s=None)
    (finding,) = found(made.evidence(episodes=(once,)))
    assert finding.share == pytest.approx(0.8)
    assert finding.ceiling is None
    assert any("unknown" in figure for figure in finding.evidence)


def test_workers_that_start_again_are_another_rules_epoch_start(made: Any) -> None:
    loaders = (made.loader(num_workers=2),)
    assert found(made.evidence(episodes=(episode(made, "epoch-start"),), loaders=loaders)) == []


def evaluating(made: Any, *, function: str = "train", speedup: float = 1.4, **changes: Any) -> Evidence:
    """A step that trains a model at line 40 and evaluates it at line 50."""
    place = made.place(50, function=function)
    call = made.module_call(place=place, training=False, evaluates=True, **changes)
    arm = made.counterfactual("knock-out", speedup, line=50)
    return made.evidence(module_calls=(made.module_call(), call), counterfactuals=(arm,))


def test_an_evaluation_in_every_step_is_proven_by_steps_without_it(made: Any) -> None:
    (finding,) = found(evaluating(made))
    assert (finding.code, finding.place, finding.message) == (
        "FO801",
        made.place(50, function="train"),
        "Model is evaluated here in every step, in addition to its training",
    )
    assert finding.ceiling is not None and finding.ceiling.speedup == pytest.approx(1.4)


@pytest.mark.parametrize(
    "fields", [{"speedup": 1.05}, {"speedup": 0.9}, {"function": "Agent.act"}, {"function": "generate"}]
)
def test_calls_that_cost_little_or_act_are_no_evaluation(made: Any, fields: dict[str, Any]) -> None:
    assert not found(evaluating(made, **fields))


@pytest.mark.parametrize("function", ["__init__", "Categorical.__init__", "<lambda>", None])
def test_a_function_whose_name_says_nothing_is_not_said_to_play(made: Any, function: str | None) -> None:
    (finding,) = found(made.evidence(episodes=(episode(made, "rollout", function=function),)))
    assert finding.message.startswith("this block generates data")
