"""What is known of a run: its sentence, and the score that stands for a task."""

from __future__ import annotations

from dataclasses import replace

from flatout.engines.adapters.report.run_report import headline, largest_gap
from flatout.engines.adapters.training.records import StepRecord
from tests.support.adapters import evaluation, report, scores


def test_the_headline_says_what_is_known() -> None:
    routed = scores("routed", 0.3).by_task
    routed["code"]["bleu"] -= 0.5
    found = evaluation(scores=(scores("oracle", 0), replace(scores("routed", 0.3), by_task=routed)))
    assert headline(report(evaluation=found)) == (
        "The router sends 97.9 % of 2,500 unseen rows to the right adapter; against a perfect one that costs "
        "at most 0.8 points (code)."
    )
    better = evaluation(scores=(scores("oracle", 0), scores("routed", -1)))
    assert "no task scores lower" in headline(report(evaluation=better))
    alone = evaluation(scores=(scores("oracle", 0),), routing=None)
    assert "no router has been trained" in headline(report(evaluation=alone))
    assert headline(report(evaluation=None)) == "Not evaluated yet."
    assert headline(report(evaluation=None, records=())) == "Nothing has been trained yet."
    assert largest_gap(alone) is None


def test_without_an_evaluation_the_first_score_of_the_log_stands_for_a_task() -> None:
    records = (
        StepRecord(phase="phase1", step=1, validation={"qa": {"loss": 1.0}}),
        StepRecord(phase="phase1", step=2, validation={"qa": {"loss": 0.9, "f1": 40.0, "exact": 30.0}}),
    )
    run = report(evaluation=None, records=records)
    assert run.metric("qa", run.of_phase("phase1")) == "f1"
    assert run.metric("code", run.of_phase("phase1")) is None
    assert run.of_phase("phase2") == []
    assert report().metric("code", ()) == "bleu"
