from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.run.schedule import FEWEST_ROUNDS, MOST_ROUNDS, WarmUp, plan_blocks

steps_s = st.floats(min_value=1e-4, max_value=60.0)
INSTRUMENTS = ["real", "count", "stacks", "kernels", "memory", "attribution"]


@given(
    step_s=steps_s, seconds=st.floats(min_value=0.1, max_value=3600), cached=st.booleans(), half=st.booleans()
)
def test_a_plan_costs_at_most_sixty_steps_and_twenty_seconds(
    step_s: float, seconds: float, cached: bool, half: bool
) -> None:
    blocks = plan_blocks(step_s, seconds=seconds, cached=cached, half=cached and half)
    num_steps = sum(block.num_steps for block in blocks)
    assert step_s * num_steps <= 60 * step_s + 20


@given(step_s=steps_s)
def test_the_slowest_warm_up_and_the_plan_together_stay_in_bounds(step_s: float) -> None:
    """The longest warm-up of equal steps: until one of its three limits is met."""
    warm_up = WarmUp()
    while not warm_up.add(step_s):
        pass
    blocks = plan_blocks(warm_up.step_s, seconds=60.0, cached=True, half=True)
    num_steps = len(warm_up.steps_s) + sum(block.num_steps for block in blocks)
    assert step_s * num_steps <= 60 * step_s + 20


@given(step_s=steps_s)
def test_every_instrument_has_its_block_before_the_rounds(step_s: float) -> None:
    blocks = plan_blocks(step_s, seconds=60.0, cached=True, half=True)
    assert [block.arm for block in blocks[: len(INSTRUMENTS)]] == INSTRUMENTS
    assert all(block.num_steps >= 1 for block in blocks)


@given(step_s=steps_s, cached=st.booleans(), half=st.booleans())
def test_the_arms_of_the_rounds_are_interleaved(step_s: float, cached: bool, half: bool) -> None:
    half = half and cached
    arms = ["real", *(["cached"] if cached else []), *(["half"] if half else [])]
    rounds = plan_blocks(step_s, seconds=60.0, cached=cached, half=half)[len(INSTRUMENTS) :]
    num_rounds = len(rounds) // len(arms)
    assert FEWEST_ROUNDS <= num_rounds <= MOST_ROUNDS
    assert [block.arm for block in rounds] == arms * num_rounds


@given(step_s=steps_s)
def test_a_round_gives_each_arm_the_same_steps_and_one_beyond_the_transition(step_s: float) -> None:
    rounds = plan_blocks(step_s, seconds=60.0, cached=True, half=True)[len(INSTRUMENTS) :]
    assert len({block.num_steps for block in rounds}) == 1
    assert rounds[0].num_steps >= 2


@given(slower=steps_s, faster=steps_s)
def test_longer_steps_never_mean_more_steps(slower: float, faster: float) -> None:
    faster, slower = sorted((faster, slower))
    for_slower = plan_blocks(slower, seconds=60.0, cached=True, half=True)
    for_faster = plan_blocks(faster, seconds=60.0, cached=True, half=True)
    assert for_slower[-1].num_steps <= for_faster[-1].num_steps


def test_little_time_leaves_the_fewest_rounds() -> None:
    arms = [block.arm for block in plan_blocks(0.01, seconds=0.1, cached=True, half=True)]
    assert arms.count("cached") == FEWEST_ROUNDS


@given(steps=st.lists(st.floats(min_value=1e-6, max_value=1e4), min_size=20, max_size=20))
def test_warm_up_ends_for_any_steps_and_says_why(steps: list[float]) -> None:
    warm_up = WarmUp()
    ended = [warm_up.add(step_s) for step_s in steps]
    assert any(ended)
    first = ended.index(True) + 1
    assert first >= 2
    assert warm_up.reason


@pytest.mark.parametrize("pace_s", [1e-3, 0.1, 1.0])
def test_warm_up_outlasts_steps_that_get_faster(pace_s: float) -> None:
    falling = [pace_s * 0.7**i for i in range(8)]
    warm_up = WarmUp()
    assert not any(warm_up.add(step_s) for step_s in falling)
    # two in a row at the pace reached: the compile is over
    assert list(itertools.islice((warm_up.add(falling[-1]) for _ in range(4)), 4))[-1]
    assert "not 20 % faster" in warm_up.reason


def test_one_slow_first_step_is_not_the_pace() -> None:
    warm_up = WarmUp()
    assert [warm_up.add(step_s) for step_s in (9.0, 0.1, 0.1, 0.1, 0.1)] == [False, False, False, False, True]
    assert warm_up.step_s == pytest.approx(0.1)


def test_long_steps_need_only_two() -> None:
    warm_up = WarmUp()
    assert [warm_up.add(step_s) for step_s in (30.0, 29.0)] == [False, True]
    assert "2 long steps" in warm_up.reason


def test_steps_that_never_settle_are_measured_all_the_same() -> None:
    warm_up = WarmUp()
    steps = [math.exp(-0.2 * i) for i in range(30)]
    num = next(i for i, step_s in enumerate(steps, start=1) if warm_up.add(step_s))
    assert num == WarmUp.MOST
    assert "not steady after 20 steps" in warm_up.reason
