from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.covering import uncovered
from tests.support import planner as plans


def sizes_of(stage: StageSettings) -> dict[str, int]:
    return {name: found.value for name, found in stage.sizes.items()}


def names(*stages: StageSettings) -> list[str]:
    found = uncovered(stages, sizes_of=sizes_of, ways_of=lambda stage: stage.precision.value)
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
