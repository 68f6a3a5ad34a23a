from __future__ import annotations

import pytest

from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.fit_settings import fit_settings
from flatout.planner.fit.show import Overview, describe_room, overview
from tests.support import planner as plans
from tests.support.planner import GIB, ToyForecast


def seen(batch_size: int, *, free_gib: float, accumulation: int = 4, margin: float = 0.85) -> Overview:
    found = plans.settings(plans.stage(batch_size, accumulation))
    budget = plans.budget(round(free_gib * GIB * margin), margin=margin)
    return overview(found, budget=budget, forecast=ToyForecast())


def test_without_a_model_memory_is_unknown() -> None:
    found = overview(plans.settings(plans.stage(4, 16), ranks=2), budget=None, forecast=None)
    (stage,) = found.stages
    assert (stage.effective_batch, stage.verdict) == (128, "unknown")
    assert stage.training is stage.evaluation is stage.largest is stage.device_share is None
    assert not found.has_findings and not found.recommendations


def test_without_a_device_there_is_a_peak_but_no_verdict() -> None:
    (stage,) = overview(plans.settings(), budget=None, forecast=ToyForecast()).stages
    assert stage.training is not None and stage.evaluation is not None
    assert (stage.verdict, stage.device_share) == ("unknown", None)


@pytest.mark.parametrize(
    ("batch_size", "free_gib", "verdict"),
    [(4, 20, "under-used"), (25, 20, "well used"), (40, 18, "beyond the margin"), (80, 20, "does not fit")],
)
def test_the_verdict(batch_size: int, free_gib: float, verdict: str) -> None:
    found = seen(batch_size, free_gib=free_gib)
    assert found.stages[0].verdict == verdict
    assert found.has_findings == (verdict != "well used")
    assert bool(found.recommendations) == (verdict != "well used")


def test_the_share_is_of_the_device_and_the_worse_of_training_and_evaluation() -> None:
    stage = plans.stage(1, 2, eval_batch_size=500)
    budget = plans.budget(100 * GIB)
    (found,) = overview(plans.settings(stage), budget=budget, forecast=ToyForecast()).stages
    assert found.training is not None and found.evaluation is not None
    assert found.evaluation.process_bytes > found.training.process_bytes
    assert found.device_share == found.evaluation.process_bytes / budget.total_bytes


def test_stages_are_seen_apart() -> None:
    stages = (
        plans.stage(8, name="01", sizes={"n_negatives": 24}),
        plans.stage(8, name="02", sizes={"n_negatives": 8}),
    )
    budget = plans.budget(30 * GIB)
    found = overview(plans.settings(*stages), budget=budget, forecast=ToyForecast())
    one, two = found.stages
    assert one.training is not None and two.training is not None
    assert one.training.process_bytes > two.training.process_bytes
    assert one.largest is not None and two.largest is not None
    assert (one.largest.tight or 0) < (two.largest.tight or 0)
    assert found.recommendations[0].startswith(
        f"a batch of {one.largest.tight} fits in every stage; flatout plan fit"
    )


def test_a_stage_with_room_is_held_back_by_one_without() -> None:
    stages = (
        plans.stage(24, name="01", sizes={"n_negatives": 24}),
        plans.stage(24, name="02", sizes={"n_negatives": 1}),
        plans.stage(24, name="03", sizes={"n_negatives": 1}, batch_file="03.yaml"),
    )
    budget = plans.budget(30 * GIB)
    found = overview(plans.settings(*stages), budget=budget, forecast=ToyForecast())
    assert [stage.verdict for stage in found.stages] == ["well used", "held back", "under-used"]
    settled = overview(plans.settings(*stages[:2]), budget=budget, forecast=ToyForecast())
    assert not settled.has_findings and not settled.recommendations


def test_what_a_full_effective_batch_leaves_unused_is_said_otherwise() -> None:
    (said,) = seen(4, free_gib=40, accumulation=1).recommendations
    assert "only a larger effective batch would use it" in said


def test_a_stage_that_does_not_fit_is_named_with_what_there_is() -> None:
    (said,) = seen(80, free_gib=20).recommendations
    assert said.startswith("training needs ")
    assert "24GB has 20.0 GiB free, 17.0 GiB at a margin of 85 %" in said
    assert describe_room(plans.budget(17 * GIB, margin=0.85)) in said


@pytest.mark.parametrize("caveats", [(), ("its sizes depend on data",)])
@pytest.mark.parametrize("margin", [0.5, 0.85, 0.95, 1.0])
@pytest.mark.parametrize("evaluation_share", [0.125, 1.0])
@pytest.mark.parametrize("eval_batch_size", [None, 4])
def test_what_fit_recommends_is_what_show_calls_the_largest(
    margin: float, caveats: tuple[str, ...], evaluation_share: float, eval_batch_size: int | None
) -> None:
    """And a config that was written so is neither beyond the margin nor under-used."""
    budget = plans.budget(round(20 * GIB * margin), margin=margin)
    forecast = ToyForecast(caveats=caveats, fragmentation=1.3, evaluation_share=evaluation_share)

    def stage(batch_size: int) -> StageSettings:
        return plans.stage(batch_size, 720720 // batch_size, eval_batch_size=eval_batch_size)

    (group,) = fit_settings(plans.settings(stage(1)), budget=budget, forecast=forecast).groups
    best = group.suggestion(None).batch_size
    (before,) = overview(plans.settings(stage(1)), budget=budget, forecast=forecast).stages
    (after,) = overview(plans.settings(stage(best)), budget=budget, forecast=forecast).stages
    assert before.largest is not None and before.largest.tight == group.largest
    assert before.caution == after.caution == group.caution
    assert (group.caution is None) == (not caveats or margin <= 0.9)
    assert 0.5 * group.largest <= best <= group.largest
    assert (before.verdict, after.verdict) == ("under-used", "well used")
    assert after.training == group.suggestion(None).peak


def test_evaluation_that_needs_too_much_is_what_is_said() -> None:
    stage = plans.stage(4, 16, eval_batch_size=1000)
    budget = plans.budget(20 * GIB)
    (said,) = overview(plans.settings(stage), budget=budget, forecast=ToyForecast()).recommendations
    assert said.startswith("evaluation of training at batch 1000 needs ")
    assert said.endswith("lower its batch (flatout plan fit)")


def test_a_device_without_bfloat16_is_said() -> None:
    stages = (plans.stage(4, 16, precision="bf16"),)
    said = {
        name: overview(
            plans.settings(*stages), budget=plans.budget(12 * GIB, name=name), forecast=ToyForecast()
        ).recommendations
        for name in ("T4", "A100-80GB")
    }
    words = "precision asks for bfloat16, which T4 does not have"
    assert said["T4"][-1] == words
    assert not any("bfloat16" in one for one in said["A100-80GB"])
    found = fit_settings(
        plans.settings(*stages), budget=plans.budget(12 * GIB, name="T4"), forecast=ToyForecast()
    )
    assert words in found.notes


def test_why_only_the_safe_is_relied_on_is_said() -> None:
    budget = plans.budget(20 * GIB)
    forecast = ToyForecast(caveats=("its sizes depend on data",))
    found = overview(plans.settings(plans.stage(4, 16)), budget=budget, forecast=forecast)
    assert found.recommendations[-1] == (
        "the margin is not fully used: a margin of 100 % spares 0 %, and its sizes depend on data"
    )
