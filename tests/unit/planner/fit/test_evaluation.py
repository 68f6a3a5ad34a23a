from __future__ import annotations

from flatout.planner.fit.evaluation import fit_evaluation
from flatout.planner.fit.fits import Judge
from flatout.planner.fit.suggestions import EvaluationFit
from tests.support import planner as plans
from tests.support.planner import GIB, ToyForecast


def fit(eval_batch_size: int | None, *, usable_gib: float = 20, may_raise: bool = False) -> EvaluationFit:
    stages = [plans.stage(name=name, eval_batch_size=eval_batch_size) for name in ("01", "02")]
    judge = Judge(budget=plans.budget(round(usable_gib * GIB)), forecast=ToyForecast())
    return fit_evaluation(stages, judge=judge, training_batch=8, may_raise=may_raise)


def test_a_size_that_fits_is_kept_unless_raising_it_is_allowed() -> None:
    kept, raised = fit(16), fit(16, may_raise=True)
    assert (kept.batch_size, kept.suggested) == (16, None)
    assert kept.largest is not None and kept.largest > 16
    assert raised.suggested == kept.largest
    assert raised.peak.process_bytes > kept.peak.process_bytes


def test_a_size_that_does_not_fit_is_lowered() -> None:
    lowered = fit(100_000)
    assert lowered.suggested == lowered.largest == fit(16).largest
    assert lowered.reason == "the configured size does not fit"


def test_without_a_size_of_its_own_it_has_that_of_training() -> None:
    shared = fit(None)
    assert (shared.batch_size, shared.suggested, shared.largest) == (8, None, None)
    assert "uses the batch of training" in shared.reason


def test_a_device_too_small_for_any_is_said() -> None:
    found = fit(16, usable_gib=1)
    assert (found.largest, found.suggested, found.reason) == (None, None, "not even a batch of 1 fits")
