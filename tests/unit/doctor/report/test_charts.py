"""The charts of a diagnosis: every step is there, none flattens the others, intervals lie at their values."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.doctor.report import charts
from flatout.doctor.report.charts import HEIGHT, arm_band, arm_keys, bars, cut_off, timeline, whiskers
from flatout.doctor.sentences import read_arms
from flatout.measure import PHASES
from flatout.measure.evidence import Step
from flatout.page.charts import Mark
from tests.support import doctor as builders


def test_a_dot_lies_inside_its_whisker_and_the_rules_stand_at_half_and_one() -> None:
    found = read_arms(builders.evidence())
    chart = whiskers(found)
    assert len(chart.rows) == len(found) == 2
    for reading, row in zip(found, chart.rows, strict=True):
        _track, half, same, line, _low, _high, dot = row.marks
        scale = same.at[0][0]
        assert dot.at[0][0] == pytest.approx(scale * reading.fraction)
        assert [x for x, _ in line.at] == pytest.approx(
            [scale * reading.fraction_low, scale * reading.fraction_high]
        )
        assert half.at[0][0] == pytest.approx(scale / 2)
        assert line.at[1][0] <= 1 and row.note == reading.words


def test_an_arm_that_is_far_slower_ends_at_the_border_and_leaves_the_ticks_apart() -> None:
    slow = replace(read_arms(builders.evidence())[0], fraction=5.0, fraction_low=2.0, fraction_high=14.0)
    (row,) = whiskers([slow]).rows
    _track, half, same, line, _low, _high, dot = row.marks
    assert same.at[0][0] - half.at[0][0] == pytest.approx(0.2)
    assert (line.at[0][0], line.at[1][0], dot.at[0][0]) == pytest.approx((0.8, 1.0, 1.0))


# The timeline


def columns(steps: tuple[Step, ...]) -> dict[str, list[Mark]]:
    """The parts of each bar by its words."""
    found: dict[str, list[Mark]] = {}
    for mark in timeline(bars(steps)).marks:
        if mark.shape == "rect" and mark.title:
            found.setdefault(mark.title, []).append(mark)
    return found


def test_every_step_is_a_bar_with_its_own_words() -> None:
    steps = builders.steps()
    titles = list(columns(steps))
    assert len(titles) == len(steps) > 40
    assert [int(title.split(",")[0].removeprefix("step ")) for title in titles] == list(range(len(steps)))
    assert "cached batches" in titles[10]


def test_steps_outside_every_mean_are_set_aside() -> None:
    steps = builders.steps()
    pale = [{mark.opacity for mark in parts} for parts in columns(steps).values()]
    assert pale == [{1.0} if step.kept else {0.4} for step in steps]
    assert [("not in any mean" in title) for title in columns(steps)] == [not step.kept for step in steps]


def test_a_bar_is_as_high_as_its_step_and_split_by_phase() -> None:
    steps = builders.steps()
    top = max(sum(step.phases_s.values()) for step in steps[1:])
    for step, parts in zip(steps[1:], list(columns(steps).values())[1:], strict=True):
        heights = {mark.colour: mark.at[1][1] - mark.at[0][1] for mark in parts}
        assert set(heights) == {phase for phase in PHASES if step.phases_s[phase] > 0}
        for phase, height in heights.items():
            assert height == pytest.approx(HEIGHT * step.phases_s[phase] / top, abs=0.03)


def test_a_step_that_would_flatten_the_others_is_cut_off() -> None:
    steps = builders.steps()
    assert [bar.first for bar in cut_off(bars(steps))] == [0]
    assert sum(mark.colour == "paper" for mark in timeline(bars(steps)).marks) == 1
    assert cut_off(bars(steps[1:])) == ()


def test_the_band_below_shows_what_was_done_to_the_steps() -> None:
    cells = list(ElementTree.fromstring(arm_band(bars(builders.steps()))).iter("span"))
    styles = [re.findall(r"--arm-(\w+)\); width: ([\d.]+)%", span.attrib["style"])[0] for span in cells]
    widths = [float(width) for _, width in styles]
    assert [arm for arm, _ in styles] == [arm for arm, _ in builders.PATTERN]
    assert widths == pytest.approx(
        [100 * num / len(builders.steps()) for _, num in builders.PATTERN], abs=0.01
    )
    assert sum(widths) == pytest.approx(100, abs=0.1)


def test_legends_name_the_arms_that_ran_and_all_phases() -> None:
    steps = tuple(step for step in builders.steps() if step.arm in ("real", "half"))
    assert [key.name for key in arm_keys(steps)] == ["as it is (12)", "half batches (12)"]
    assert [key.name for key in timeline(bars(steps)).legend] == list(PHASES)


def test_one_step_without_time_can_be_drawn() -> None:
    step = dataclasses.replace(builders.steps()[0], phases_s={}, step_s=0.0)
    assert "1 steps" in timeline(bars((step,))).label


@given(most=st.integers(min_value=1, max_value=80))
def test_every_step_is_in_exactly_one_bar_of_its_own_block(most: int) -> None:
    steps = builders.steps()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(charts, "MOST_BARS", most)
        made = bars(steps)
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
