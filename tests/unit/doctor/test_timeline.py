"""The timeline: every step is there, bars are as high as their steps, and none flattens the others."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.doctor.timeline import HEIGHT, arm_legend, bars, cut_off, phase_legend, round_ticks, timeline
from flatout.measure import PHASES
from flatout.measure.evidence import Step
from tests.support import doctor as builders


def columns(steps: tuple[Step, ...]) -> list[ElementTree.Element]:
    drawing = ElementTree.fromstring(timeline(bars(steps)))
    return [group for group in drawing.iter("g") if group.attrib.get("class", "").startswith("step")]


def test_every_step_is_a_bar_with_its_own_words() -> None:
    steps = builders.steps()
    titles = [column.findtext("title") or "" for column in columns(steps)]
    assert len(titles) == len(steps) > 40
    assert [int(title.split(",")[0].removeprefix("step ")) for title in titles] == list(range(len(steps)))
    assert "cached batches" in titles[10]


def test_steps_outside_every_mean_are_set_aside() -> None:
    steps = builders.steps()
    aside = [column.attrib["class"] == "step aside" for column in columns(steps)]
    assert aside == [not step.kept for step in steps]


def test_a_bar_is_as_high_as_its_step_and_split_by_phase() -> None:
    steps = builders.steps()
    top = max(sum(step.phases_s.values()) for step in steps[1:])
    for step, column in zip(steps[1:], columns(steps)[1:], strict=True):
        heights = {rect.attrib["class"]: float(rect.attrib["height"]) for rect in column.iter("rect")}
        assert set(heights) == {phase for phase in PHASES if step.phases_s[phase] > 0}
        for phase, height in heights.items():
            assert height == pytest.approx(HEIGHT * step.phases_s[phase] / top, abs=0.03)


def test_a_step_that_would_flatten_the_others_is_cut_off() -> None:
    steps = builders.steps()
    assert [bar.first for bar in cut_off(bars(steps))] == [0]
    assert [rect.attrib["class"] for rect in columns(steps)[0].iter("rect")][-1] == "cut"
    assert cut_off(bars(steps[1:])) == ()


def test_the_band_below_shows_what_was_done_to_the_steps() -> None:
    drawing = ElementTree.fromstring(timeline(bars(builders.steps())))
    cells = [span for span in drawing.iter("span") if "style" in span.attrib]
    widths = [float(span.attrib["style"].removeprefix("width:").removesuffix("%")) for span in cells]
    assert [span.attrib["class"] for span in cells] == [f"arm-{arm}" for arm, _ in builders.PATTERN]
    assert widths == pytest.approx(
        [100 * num / len(builders.steps()) for _, num in builders.PATTERN], abs=0.01
    )
    assert sum(widths) == pytest.approx(100, abs=0.1)


def test_legends_name_the_arms_that_ran_and_all_phases() -> None:
    steps = tuple(step for step in builders.steps() if step.arm in ("real", "half"))
    assert re.findall(r"</i>([^<]+)", arm_legend(steps)) == ["as it is (12)", "half batches (12)"]
    assert re.findall(r"</i>([^<]+)", phase_legend()) == list(PHASES)


def test_one_step_without_time_can_be_drawn() -> None:
    step = dataclasses.replace(builders.steps()[0], phases_s={}, step_s=0.0)
    assert len(columns((step,))) == 1


@given(most=st.integers(min_value=1, max_value=80))
def test_every_step_is_in_exactly_one_bar_of_its_own_block(most: int) -> None:
    steps = builders.steps()
    made = bars(steps, most=most)
    assert [bar.first for bar in made] == [
        sum(earlier.num_steps for earlier in made[:i]) for i in range(len(made))
    ]
    assert sum(bar.num_steps for bar in made) == len(steps)
    for bar in made:
        inside = steps[bar.first : bar.first + bar.num_steps]
        assert len({step.block for step in inside}) == 1
        assert {step.arm for step in inside} == {bar.arm}
        shown = [step for step in inside if step.kept] or inside
        assert bar.length_s == pytest.approx(sum(sum(step.phases_s.values()) for step in shown) / len(shown))
        assert bar.kept == any(step.kept for step in inside)
    assert len(made) <= most + len(builders.PATTERN)


@given(st.floats(min_value=1e-7, max_value=1e5))
def test_ticks_are_few_round_and_inside_the_scale(top: float) -> None:
    ticks = round_ticks(top)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert ticks[-1] <= top * (1 + 1e-9)
    assert f"{ticks[1]:e}"[0] in "125"
