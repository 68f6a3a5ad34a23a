from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import BatchBounds, Peak
from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.fits import Judge, evaluation_recipe
from flatout.planner.fit.progress import Progress
from flatout.planner.fit.search import (
    SAFEST_SHARE,
    GroupSearch,
    expected_traces,
    find_uncovered,
    fit_evaluation,
)
from flatout.planner.fit.suggestions import EvaluationFit, GroupFit, Suggestion, Wish
from tests.support import planner as plans
from tests.support.planner import GIB, ToyForecast


def search(
    *stages: StageSettings,
    usable_gib: float = 20,
    ranks: int = 1,
    wish: Wish | None = None,
    forecast: ToyForecast | None = None,
) -> GroupFit:
    return GroupSearch(
        stages=stages or (plans.stage(),),
        judge=Judge(budget=plans.budget(round(usable_gib * GIB)), forecast=forecast or ToyForecast()),
        wish=wish or Wish(),
        ranks=ranks,
    ).fit()


def by_name(group: GroupFit) -> dict[str, Suggestion]:
    return {name: one for one in group.suggestions for name in one.names}


def test_the_largest_divisor_that_fits_is_taken() -> None:
    group = search(plans.stage(4, 16))
    best = by_name(group)["largest batch"]
    assert best.batch_size * best.accumulations["training"] == 64
    assert 64 % best.batch_size == 0
    assert best.batch_size <= group.largest < 2 * best.batch_size
    assert group.safe is not None and group.largest > group.safe


@given(
    batch_size=st.integers(1, 64),
    accumulation=st.integers(1, 32),
    ranks=st.integers(1, 8),
    usable_gib=st.integers(5, 120),
    negatives=st.lists(st.integers(0, 64), min_size=1, max_size=4),
    eval_batch_size=st.none() | st.integers(1, 256),
    checkpointing=st.booleans(),
)
def test_whatever_is_suggested_fits_and_keeps_the_effective_batch(
    batch_size: int,
    accumulation: int,
    ranks: int,
    usable_gib: int,
    negatives: list[int],
    eval_batch_size: int | None,
    checkpointing: bool,
) -> None:
    forecast = ToyForecast()
    stages = [
        plans.stage(
            batch_size,
            accumulation,
            name=f"{number:02}",
            sizes={"n_negatives": count},
            eval_batch_size=eval_batch_size,
            checkpointing=checkpointing,
        )
        for number, count in enumerate(negatives)
    ]
    try:
        group = search(*stages, usable_gib=usable_gib, ranks=ranks, forecast=forecast)
    except (BatchDoesNotFit, BadInput):
        assume(False)
    for one in group.suggestions:
        assert one.peak.process_bytes <= usable_gib * GIB  # which is all that is free
        for stage in stages:
            recipe = dataclasses.replace(
                stage.recipe, checkpointing=one.checkpointing, accumulation=one.accumulations[stage.name]
            )
            sizes = {"batch_size": one.batch_size, "n_negatives": stage.sizes["n_negatives"].value}
            assert forecast.trains(sizes, recipe=recipe, capacity_bytes=usable_gib * GIB)
            needed = forecast.peak_bytes(sizes, recipe=recipe).process_bytes
            assert min(needed, usable_gib * GIB) <= one.peak.process_bytes
            effective = one.batch_size * one.accumulations[stage.name] * ranks
            assert one.effective_batches[stage.name] == effective
            assert one.keeps_effective_batch == (effective == batch_size * accumulation * ranks)


def test_the_worst_stage_decides_for_a_shared_batch() -> None:
    light, heavy = (
        plans.stage(name=name, sizes={"n_negatives": count}) for name, count in (("01", 2), ("02", 24))
    )
    assert search(light, heavy).largest == search(heavy).largest < search(light).largest
    assert search(light, heavy).suggestions[0].worst_stage == "02"


def test_stages_with_their_own_accumulation_keep_their_own_effective_batch() -> None:
    group = search(plans.stage(4, 16, name="01"), plans.stage(4, 24, name="02"), usable_gib=60)
    best = group.suggestion(None)
    assert best.effective_batches == {"01": 64, "02": 96}
    assert 32 % best.batch_size == 0


def test_without_accumulation_more_fits_and_that_is_used() -> None:
    """In one piece no gradients wait: 8 in one step fit where 8 of several do not."""
    forecast = ToyForecast(weights_bytes=4 * GIB)
    usable = forecast.peak_bytes({"batch_size": 8, "n_negatives": 1}, recipe=plans.stage(8, 1).recipe)
    usable_gib = (usable.allocated_bytes + forecast.context_bytes) / GIB
    group = search(plans.stage(4, 2), usable_gib=usable_gib, forecast=forecast)
    assert (group.largest, group.suggestion(None).batch_size) == (8, 8)
    with pytest.raises(BatchDoesNotFit):  # eleven have to be accumulated, and not even one of them fits
        search(plans.stage(11, 1), usable_gib=usable_gib, forecast=forecast)


def test_a_prime_effective_batch_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput) as error:
        search(plans.stage(61, 1), usable_gib=15)
    assert "the effective batch of 61 cannot be kept" in error.value.message
    assert "the largest that divides it is 1" in error.value.message
    assert error.value.hint is not None and "60 (" in error.value.hint and "--effective" in error.value.hint


def test_a_prime_effective_batch_that_fits_is_kept() -> None:
    assert search(plans.stage(61, 1), usable_gib=80).suggestion(None).batch_size == 61


def test_an_effective_batch_that_was_asked_for() -> None:
    best = search(plans.stage(4, 16), ranks=2, wish=Wish(effective_batch=96)).suggestion(None)
    assert best.effective_batches == {"training": 96}
    assert best.keeps_effective_batch


def test_the_safest_leaves_more_free_and_the_widest_changes_the_objective() -> None:
    group = search(plans.stage(4, 16), usable_gib=15)
    found = by_name(group)
    assert (
        found["safest"].peak.process_bytes
        <= 15 * GIB * SAFEST_SHARE
        < found["largest batch"].peak.process_bytes
    )
    widest = found["largest effective batch"]
    assert (widest.batch_size, widest.accumulations) == (group.largest, {"training": 16})
    assert not widest.keeps_effective_batch
    assert f"--effective {group.largest * 16}" in widest.reason.reason


@pytest.mark.parametrize(
    ("configured", "name"), [(False, "with checkpointing"), (True, "without checkpointing")]
)
def test_the_other_side_of_checkpointing_is_offered(configured: bool, name: str) -> None:
    group = search(plans.stage(checkpointing=configured))
    assert by_name(group)[name].checkpointing is not configured
    assert group.suggestion(None).checkpointing is configured


def test_a_model_without_the_switch_is_planned_without_it() -> None:
    assert "with checkpointing" not in by_name(search(forecast=ToyForecast(can_checkpoint=False)))
    with pytest.raises(BadInput, match="gradient_checkpointing_enable"):
        search(plans.stage(checkpointing=True), forecast=ToyForecast(can_checkpoint=False))


def test_a_model_without_the_switch_that_nothing_fits_is_told_what_it_needs() -> None:
    class NoRoom(ToyForecast):
        """As on a device that the CUDA context alone fills: no batch is tried, so no model is made."""

        def largest_within(
            self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int
        ) -> BatchBounds:
            return BatchBounds(safe=None, tight=None)

    with pytest.raises(BatchDoesNotFit, match="batch_size=1 needs"):
        search(plans.stage(4, 16), usable_gib=0.1, forecast=NoRoom(can_checkpoint=False))


def test_stages_that_differ_keep_their_own_switch() -> None:
    stages = (plans.stage(name="01", checkpointing=True), plans.stage(name="02"))
    assert search(*stages).largest == search(stages[1]).largest


def test_nothing_timed_is_assumed_and_said_so() -> None:
    fastest = by_name(search(plans.stage(checkpointing=True)))["fastest"]
    assert (fastest.checkpointing, fastest.reason.source, fastest.step_s) == (False, "assumed", None)


def test_what_was_timed_decides() -> None:
    """A step that grows faster than the batch: the largest batch is not the quickest."""
    forecast = ToyForecast(
        seconds=lambda batch, checkpointing: (batch / 8) ** 2 * (1.3 if checkpointing else 1)
    )
    group = search(plans.stage(4, 16), forecast=forecast)
    fastest = group.suggestion(None)
    assert "fastest" in fastest.names
    assert fastest.reason.source == "measured"
    assert (fastest.batch_size, fastest.step_s) == (1, pytest.approx(64 * (1 / 8) ** 2))


def test_checkpointing_is_not_chosen_where_the_config_cannot_say_it() -> None:
    forecast = ToyForecast(seconds=lambda batch, checkpointing: 0.1 if checkpointing else 1.0)
    stage = plans.stage()
    assert search(stage, forecast=forecast).suggestion(None).checkpointing
    fixed = dataclasses.replace(stage, checkpointing=dataclasses.replace(stage.checkpointing, place=None))
    assert not search(fixed, forecast=forecast).suggestion(None).checkpointing


def test_evaluation_has_a_size_of_its_own() -> None:
    kept = search(plans.stage(eval_batch_size=16)).evaluation
    assert (kept.batch_size, kept.suggested) == (16, None)
    assert kept.largest is not None and kept.largest > 16
    raised = search(plans.stage(eval_batch_size=16), wish=Wish(allow=("eval_batch_size",))).evaluation
    assert raised.suggested == kept.largest
    lowered = search(plans.stage(eval_batch_size=100_000)).evaluation
    assert (lowered.suggested, lowered.reason) == (kept.largest, "the configured size does not fit")
    shared = search(plans.stage()).evaluation
    assert shared.suggested is None and "uses the training batch" in shared.reason


def test_evaluation_through_the_loader_of_training_bounds_the_batch() -> None:
    """Checkpointing makes training so cheap here that evaluation needs more."""
    stage = plans.stage(64, 64, checkpointing=True)
    own = dataclasses.replace(stage, eval_batch_size=plans.setting(1, "eval_batch_size"))
    forecast = ToyForecast(evaluation_share=1.0)
    assert search(stage, forecast=forecast).largest < search(own, forecast=forecast).largest
    bound = forecast.largest_within(
        {"batch_size": 1, "n_negatives": 1}, recipe=evaluation_recipe(stage), capacity_bytes=20 * GIB
    )
    assert search(stage, forecast=forecast).largest == bound.tight


def test_nothing_fits_unless_checkpointing_is_asked_for() -> None:
    stage = plans.stage(4, 16)
    forecast = ToyForecast(sample_bytes=8 * GIB)
    with pytest.raises(BatchDoesNotFit, match="checkpointing"):
        search(stage, usable_gib=9, forecast=forecast)
    for wish in (Wish(choose="with checkpointing"), Wish(allow=("checkpointing",))):
        group = search(stage, usable_gib=9, forecast=forecast, wish=wish)
        assert group.suggestion(None).checkpointing


def test_an_allowed_size_is_lowered_only_where_it_must_be() -> None:
    stages = [plans.stage(name=f"0{i}", sizes={"n_negatives": count}) for i, count in ((1, 200), (2, 4))]
    with pytest.raises(BatchDoesNotFit, match="in 01"):
        search(*stages, usable_gib=8)
    group = search(*stages, usable_gib=8, wish=Wish(allow=("n_negatives",)))
    assert set(group.lowered) == {"01"}
    value = group.lowered["01"]["n_negatives"]
    assert 4 < value < 200
    assert group.suggestion(None).peak.process_bytes <= 8 * GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedForecast(ToyForecast):
    """Keeps what it was asked."""

    searched: list[tuple[int, str, bool]] = dataclasses.field(default_factory=list)
    peaks: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def largest_within(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> BatchBounds:
        self.searched.append((sizes["n_negatives"], recipe.mode, recipe.checkpointing))
        plain = ToyForecast(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(ToyForecast)}
        )
        return plain.largest_within(sizes, recipe=recipe, capacity_bytes=capacity_bytes)

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        self.peaks.append((sizes["n_negatives"], sizes["batch_size"]))
        return super().peak_bytes(sizes, recipe=recipe)


def test_a_curriculum_is_searched_at_its_worst_stage_and_checked_at_the_others() -> None:
    stages = [
        plans.stage(4, 16, name=f"0{number}", sizes={"n_negatives": count})
        for number, count in enumerate((24, 8, 8, 8, 8))
    ]
    forecast = CountedForecast()
    group = search(*stages, forecast=forecast)
    # The same batch with several accumulated and with the configured number of them is one search.
    assert set(forecast.searched) == {(24, "train", False), (24, "train", True)}
    best = group.suggestion(None)
    assert {batch for count, batch in forecast.peaks if count == 8} == {best.batch_size}
    assert list(best.peaks) == [stage.name for stage in stages]
    assert best.peaks["01"].process_bytes < best.peaks["00"].process_bytes == best.peak.process_bytes


def test_a_stage_that_only_seemed_to_need_less_is_searched_too() -> None:
    """A size that saves memory the larger it is, as patches do."""
    stages = [
        plans.stage(4, 16, name=name, sizes={"n_negatives": count}) for name, count in (("01", 24), ("02", 8))
    ]
    inverse = ToyForecast(sample_bytes=2 * GIB, negative_bytes=-32 * plans.MIB)
    group = search(*stages, forecast=inverse)
    assert group.suggestion(None).worst_stage == "02"
    assert group.largest == search(stages[1], forecast=inverse).largest


def test_evaluation_is_searched_only_where_it_has_a_size_of_its_own() -> None:
    shared, own = CountedForecast(), CountedForecast()
    assert search(plans.stage(4, 16), forecast=shared).evaluation.largest is None
    assert search(plans.stage(4, 16, eval_batch_size=8), forecast=own).evaluation.largest is not None
    assert not any(mode == "evaluate" for _, mode, _ in shared.searched)
    assert any(mode == "evaluate" for _, mode, _ in own.searched)


def test_what_is_expected_is_what_is_asked() -> None:
    said: list[str] = []

    class Speaking(ToyForecast):
        def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
            progress.work("tracing")
            return super().peak_bytes(sizes, recipe=recipe)

    stages = tuple(
        plans.stage(name=name, sizes={"n_negatives": count}) for name, count in (("01", 24), ("02", 8))
    )
    progress = Progress(said.append, clock=lambda: 0.0)
    progress.expect(expected_traces(stages))
    GroupSearch(
        stages=stages,
        judge=Judge(budget=plans.budget(20 * GIB), forecast=Speaking()),
        wish=Wish(),
        ranks=1,
        progress=progress,
    ).fit()
    assert list(dict.fromkeys(line.rpartition(": ")[0] for line in said)) == [
        "[1 of 4] 01, largest batch without checkpointing",
        "[2 of 4] 01, largest batch with checkpointing",
        "[3 of 4] 02 at batch 8",
        "[4 of 4] 01, evaluation",
    ]


def sizes_of(stage: StageSettings) -> dict[str, int]:
    return {name: found.value for name, found in stage.sizes.items()}


def names(*stages: StageSettings) -> list[str]:
    found = find_uncovered(stages, sizes_of=sizes_of, ways_of=lambda stage: stage.precision.value)
    return [stage.name for stage in found]


def stage(name: str, a: int, b: int, **options: str) -> StageSettings:
    return plans.stage(name=name, sizes={"a": a, "b": b}, **options)  # type: ignore[arg-type]


def test_one_that_is_nowhere_above_another_is_left_out() -> None:
    assert names(stage("01", 32, 24), stage("02", 16, 8), stage("03", 16, 8)) == ["01"]
    assert names(stage("01", 16, 8), stage("02", 16, 8), stage("03", 16, 9)) == ["03"]


def test_one_that_is_above_in_one_size_or_trains_otherwise_stays() -> None:
    assert names(stage("01", 32, 8), stage("02", 16, 24)) == ["01", "02"]
    assert names(stage("01", 32, 8), stage("02", 16, 4, precision="bf16")) == ["01", "02"]


def test_of_equals_the_first_stays() -> None:
    assert names(stage("01", 1, 1), stage("02", 1, 1)) == ["01"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_every_stage_is_covered_by_one_that_stays(pairs: list[tuple[int, int]]) -> None:
    stages = {f"{number:02}": stage(f"{number:02}", *pair) for number, pair in enumerate(pairs)}
    kept = [sizes_of(stages[name]) for name in names(*stages.values())]
    assert kept
    for one in stages.values():
        sizes = sizes_of(one)
        assert any(all(other[name] >= sizes[name] for name in sizes) for other in kept)
    assert len({tuple(other.items()) for other in kept}) == len(kept)


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
    assert "uses the training batch" in shared.reason


def test_a_device_too_small_for_any_is_said() -> None:
    found = fit(16, usable_gib=1)
    assert (found.largest, found.suggested, found.reason) == (None, None, "not even a batch of 1 fits")
