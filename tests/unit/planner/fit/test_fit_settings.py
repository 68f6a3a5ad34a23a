from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.memory.predict.forecast import BatchBounds
from flatout.planner.config.settings import Setting, StageSettings
from flatout.planner.fit.fit_settings import changes_of, fit_settings, group_stages
from flatout.planner.fit.suggestions import Fit, Wish
from tests.support import planner as plans
from tests.support.planner import GIB, ToyForecast


def fit(
    *stages: StageSettings,
    wish: Wish | None = None,
    usable_gib: float = 20,
    ranks: int = 1,
    forecast: ToyForecast | None = None,
) -> Fit:
    return fit_settings(
        plans.settings(*stages, ranks=ranks),
        budget=plans.budget(round(usable_gib * GIB)),
        forecast=forecast or ToyForecast(),
        wish=wish,
    )


def changes(found: Fit, *, choose: str | None = None) -> dict[str, object]:
    return {f"{place.path}:{place.key}": value for place, value in changes_of(found, choose=choose).items()}


def test_what_is_written_is_what_changes() -> None:
    found = fit(plans.stage(4, 16))
    best = found.groups[0].suggestion(None)
    assert changes(found) == {
        "config.yaml:batch_size": best.batch_size,
        "config.yaml:accumulation": 64 // best.batch_size,
    }
    settled = fit(plans.stage(best.batch_size, 64 // best.batch_size))
    assert changes(settled) == {}


def test_objective_knobs_are_not_touched() -> None:
    found = fit(plans.stage(sizes={"n_negatives": 24, "n_positives": 32}))
    assert {key.partition(":")[2] for key in changes(found)} <= {"batch_size", "accumulation"}
    assert found.notes[0] == "n_positives is not a size of the job, so the estimate ignores it"


def test_another_suggestion_is_written_on_request() -> None:
    found = fit(plans.stage(4, 16), wish=Wish(choose="with checkpointing"))
    assert changes(found, choose="with checkpointing")["config.yaml:checkpointing"] is True
    with pytest.raises(BadInput, match="there is no suggestion 'quickest'"):
        fit(wish=Wish(choose="quickest"))


def test_what_changes_the_objective_is_not_written_unless_asked_for() -> None:
    found = fit(plans.stage(4, 16))
    with pytest.raises(
        BadInput, match=r"changes the effective batch, a part of the objective, to .*--effective"
    ):
        changes_of(found, choose="largest effective batch")


def test_a_changed_effective_batch_comes_with_the_rule_for_the_learning_rate() -> None:
    found = fit(plans.stage(4, 16), wish=Wish(effective_batch=256))
    assert found.notes[0].startswith("the effective batch goes from 64 to 256 (×4); the learning rate 0.0002")
    assert found.groups[0].suggestion(None).effective_batches == {"training": 256}
    same = fit(plans.stage(4, 16), wish=Wish(effective_batch=64)).notes
    assert not any("learning rate" in note for note in same)


@pytest.mark.parametrize(("effective", "near"), [(100, "99 or 102"), (0, "3"), (-5, "3"), (1, "3")])
def test_an_effective_batch_that_the_ranks_cannot_share(effective: int, near: str) -> None:
    with pytest.raises(
        BadInput, match=rf"--effective {effective} cannot be spread over 3 ranks .*nearest: {near}"
    ):
        fit(wish=Wish(effective_batch=effective), ranks=3)


@pytest.mark.parametrize(
    ("name", "words"), [("learning_rate", "stated and yours to apply"), ("n_positives", "unknown")]
)
def test_what_cannot_be_allowed(name: str, words: str) -> None:
    with pytest.raises(
        BadInput, match=rf"--allow {name}: .*{words}.*checkpointing, eval_batch_size, n_negatives"
    ):
        fit(wish=Wish(allow=(name,)))


def test_a_suggestion_that_does_not_exist_is_said_before_any_work() -> None:
    class NoWork(ToyForecast):
        def largest_within(self, sizes: object, **asked: object) -> BatchBounds:
            raise AssertionError("searched")

    with pytest.raises(BadInput, match=r"there is no suggestion 'safe' .*choose one of: .*safest"):
        fit(wish=Wish(choose="safe"), forecast=NoWork())


def test_stages_with_batch_sizes_of_their_own_are_planned_apart() -> None:
    one, two = (
        plans.stage(4, 16, name=name, batch_file=f"{name}.yaml", sizes={"n_negatives": count})
        for name, count in (("01", 1), ("02", 40))
    )
    found = fit(one, two)
    assert [len(group.stages) for group in found.groups] == [1, 1]
    assert found.groups[0].largest > found.groups[1].largest
    assert {"01.yaml:batch_size", "02.yaml:batch_size"} <= set(changes(found))


def test_stages_that_share_only_accumulation_cannot_be_kept_apart() -> None:
    one, two = (plans.stage(name=name, batch_file=f"{name}.yaml") for name in ("01", "02"))
    two = dataclasses.replace(two, accumulation=one.accumulation)
    with pytest.raises(BadInput, match="02 has a batch size of its own but shares accumulation"):
        group_stages([one, two])


def test_a_lowered_size_is_written_where_it_stands_and_said() -> None:
    found = fit(
        plans.stage(name="01", sizes={"n_negatives": 200}), usable_gib=8, wish=Wish(allow=("n_negatives",))
    )
    value = found.groups[0].lowered["01"]["n_negatives"]
    assert changes(found)["01.yaml:n_negatives"] == value
    assert f"n_negatives of 01 is lowered to {value}, as allowed: this changes the objective" in found.notes


def test_evaluation_is_written_when_it_does_not_fit() -> None:
    found = fit(plans.stage(eval_batch_size=100_000))
    assert changes(found)["config.yaml:eval_batch_size"] == found.groups[0].evaluation.largest


def test_a_value_without_a_place_is_refused_with_what_to_do() -> None:
    stage = plans.stage(4, 16)
    found = fit(dataclasses.replace(stage, accumulation=plans.without_place(stage.accumulation)))
    with pytest.raises(
        BadInput,
        match=r"sets accumulation to \d+, and there is no place to write it .*--knob accumulation=KEY",
    ):
        changes_of(found)


def test_one_place_cannot_take_two_values() -> None:
    one, two = (plans.stage(4, steps, name=f"0{steps}") for steps in (8, 16))
    found = fit(one, two)
    with pytest.raises(BadInput, match=r"stages that share accumulation .* would need different values"):
        changes_of(found)


def test_places_are_paths() -> None:
    assert all(isinstance(place.path, Path) for place in changes_of(fit()))


def test_a_global_batch_is_kept_without_a_key_for_accumulation() -> None:
    whole = plans.setting(64, "global_batch_size")
    derived = Setting(value=16, source="global_batch_size over 4")
    stage = dataclasses.replace(plans.stage(4, 16), global_batch_size=whole, accumulation=derived)
    assert set(changes(fit(stage))) == {"config.yaml:batch_size"}
    raised = changes(fit(stage, wish=Wish(effective_batch=256)))
    assert raised["config.yaml:global_batch_size"] == 256
