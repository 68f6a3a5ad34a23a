from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flatout
from flatout.measure.run import steps
from flatout.measure.run.steps import (
    BACKWARD_CALL,
    EXPLICIT,
    MODEL_CALL,
    OPTIMIZER_STEP,
    PATIENCE,
    STALE_FACTOR,
    Anchor,
    AnchorKey,
)

GENERATOR: AnchorKey = (OPTIMIZER_STEP, 1)
DISCRIMINATOR: AnchorKey = (OPTIMIZER_STEP, 2)
MARK: AnchorKey = (EXPLICIT, 0)
BACKWARD: AnchorKey = (BACKWARD_CALL, 0)
MODEL: AnchorKey = (MODEL_CALL, 0)
NAMES = {
    GENERATOR: "Adam.step",
    DISCRIMINATOR: "RMSprop.step",
    MARK: "flatout.step",
    BACKWARD: "backward",
    MODEL: "Net call",
}


def ends(anchor: Anchor, *keys: AnchorKey) -> list[bool]:
    return [anchor.add(key, NAMES[key]) for key in keys]


def test_one_optimizer_ends_every_step() -> None:
    anchor = Anchor()
    assert ends(anchor, *[GENERATOR] * 4) == [True] * 4
    assert anchor.name == "Adam.step"


def test_two_discriminator_steps_and_a_generator_step_are_one() -> None:
    anchor = Anchor()
    ends(anchor, DISCRIMINATOR, DISCRIMINATOR, GENERATOR)
    assert ends(anchor, *[DISCRIMINATOR, DISCRIMINATOR, GENERATOR] * 3) == [False, False, True] * 3
    assert anchor.name == "Adam.step"


def test_of_equally_frequent_optimizers_the_last_to_appear_ends_the_step() -> None:
    anchor = Anchor()
    ends(anchor, DISCRIMINATOR, GENERATOR)
    assert ends(anchor, *[DISCRIMINATOR, GENERATOR] * 3) == [False, True] * 3


@given(repeats=st.integers(2, 6), num_steps=st.integers(3, 10))
def test_the_rarest_optimizer_is_the_anchor_whatever_the_order(repeats: int, num_steps: int) -> None:
    for cycle in ([DISCRIMINATOR] * repeats + [GENERATOR], [GENERATOR] + [DISCRIMINATOR] * repeats):
        anchor = Anchor()
        ends(anchor, *cycle * 2)  # while they appear, the counts may still be equal
        assert sum(ends(anchor, *cycle * num_steps)) == num_steps
        assert anchor.current == GENERATOR


def test_an_optimizer_that_stepped_once_and_never_again_is_forgotten() -> None:
    anchor = Anchor()
    ends(anchor, GENERATOR)
    marks = ends(anchor, *[DISCRIMINATOR] * (STALE_FACTOR + 5))
    assert anchor.current == DISCRIMINATOR
    assert marks[-5:] == [True] * 5


def test_a_frozen_anchor_stays_whatever_comes() -> None:
    anchor = Anchor()
    ends(anchor, DISCRIMINATOR)
    anchor.freeze()
    assert ends(anchor, GENERATOR, DISCRIMINATOR, GENERATOR) == [False, True, False]
    assert anchor.name == "RMSprop.step"


def test_explicit_marks_outrank_optimizers() -> None:
    anchor = Anchor()
    ends(anchor, GENERATOR, MARK)
    assert ends(anchor, *[GENERATOR, MARK] * 2) == [False, True] * 2
    assert anchor.name == "flatout.step"


def test_a_stronger_mark_after_freezing_says_what_was_measured_was_no_step() -> None:
    anchor = Anchor()
    ends(anchor, *[MODEL] * (PATIENCE + 1))
    anchor.freeze()
    assert anchor.outranks(GENERATOR) and anchor.outranks(BACKWARD) and anchor.outranks(MARK)
    assert not anchor.outranks(MODEL)


def test_an_anchor_gives_way_to_a_stronger_mark_that_comes_again() -> None:
    anchor = Anchor()
    ends(anchor, *[BACKWARD] * (PATIENCE + 1))
    anchor.freeze()
    assert [anchor.gives_way(key) for key in (GENERATOR, DISCRIMINATOR, GENERATOR)] == [False, False, True]


def test_nothing_outranks_an_anchor_that_is_not_frozen() -> None:
    assert not Anchor().outranks(MARK)


def test_backwards_without_an_optimizer_end_steps_after_some_patience() -> None:
    anchor = Anchor()
    assert ends(anchor, *[MODEL, BACKWARD] * PATIENCE) == [False] * 2 * PATIENCE
    marks = ends(anchor, *[MODEL, BACKWARD] * 3)
    assert marks[-2:] == [False, True]
    assert anchor.current == BACKWARD


def test_model_calls_alone_end_steps_after_some_patience() -> None:
    anchor = Anchor()
    assert ends(anchor, *[MODEL] * (PATIENCE + 2)) == [False] * PATIENCE + [True] * 2
    assert anchor.name == "Net call"


def test_no_marks_no_anchor() -> None:
    assert Anchor().current is None
    assert Anchor().name is None


@given(st.lists(st.sampled_from([GENERATOR, DISCRIMINATOR, MARK, BACKWARD, MODEL]), min_size=1, max_size=80))
def test_a_step_ends_only_at_the_anchor_and_the_strongest_kind_wins(keys: list[AnchorKey]) -> None:
    anchor = Anchor()
    for key in keys:
        assert anchor.add(key, NAMES[key]) == (anchor.current == key)
    strongest = min(kind for kind, _ in keys)
    if strongest <= OPTIMIZER_STEP:
        assert anchor.current is not None and anchor.current[0] == strongest


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    yield
    steps.listen(None)


def test_a_step_outside_a_diagnosis_does_nothing() -> None:
    assert steps.step() is None  # type: ignore[func-returns-value]


def test_a_listener_hears_every_step_until_it_leaves() -> None:
    heard: list[str] = []
    steps.listen(lambda: heard.append("step"))
    steps.step()
    flatout.step()
    steps.listen(None)
    steps.step()
    assert heard == ["step", "step"]
