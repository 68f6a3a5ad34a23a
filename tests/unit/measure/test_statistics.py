from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.evidence import Step
from flatout.measure.statistics import bootstrap_interval, compare, outliers, spread, typical_steps

NUM_ROUNDS, NUM_STEPS = 6, 8


def step(index: int, arm: str, block: int, step_s: float, *, wait_s: float = 0.0, kept: bool = True) -> Step:
    phases_s = {"wait": wait_s, "rest": step_s - wait_s}
    return Step(index=index, arm=arm, block=block, step_s=step_s, phases_s=phases_s, kept=kept)


def rounds(
    *,
    speedup: float,
    noise: float,
    seed: int,
    drift: float = 0.0,
    first_block: int = 5,
    num_rounds: int = NUM_ROUNDS,
) -> list[Step]:
    """Interleaved real and cached blocks; `drift` makes every block slower than the one before."""
    random = np.random.default_rng(seed)
    steps: list[Step] = []
    for number in range(2 * num_rounds + 1):
        arm, faster = ("cached", speedup) if number % 2 else ("real", 1.0)
        for _ in range(NUM_STEPS):
            factor = float(np.exp(noise * random.standard_normal()))
            pace_s = 0.1 * (1 + drift) ** number / faster
            steps.append(step(len(steps), arm, first_block + number, pace_s * factor))
    return steps


@given(speedup=st.floats(0.5, 10.0), noise=st.floats(0.0, 0.1), seed=st.integers(0, 10_000))
def test_the_interval_surrounds_the_measured_speedup(speedup: float, noise: float, seed: int) -> None:
    found = compare(rounds(speedup=speedup, noise=noise, seed=seed), label="cached", baseline="real")
    assert found is not None
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert found.speedup == pytest.approx(found.baseline_step_s / found.step_s)
    assert found.speedup == pytest.approx(speedup, rel=0.01 + noise)
    assert (found.num_blocks, found.num_steps) == (NUM_ROUNDS, NUM_ROUNDS * NUM_STEPS)


@pytest.mark.parametrize("speedup", [1.0, 1.3, 4.0])
def test_a_planted_speedup_lies_inside_the_interval_as_often_as_it_claims(speedup: float) -> None:
    """Equal arms included: their interval holds 1."""
    inside = 0
    for seed in range(60):
        found = compare(rounds(speedup=speedup, noise=0.05, seed=seed), label="cached", baseline="real")
        assert found is not None
        inside += found.speedup_low <= speedup <= found.speedup_high
    assert inside >= 51  # of 60; 95 % on average, bootstraps of few rounds are a little narrow


@pytest.mark.parametrize(("num_rounds", "differ"), [(1, 0.1), (2, 0.1), (2, 0.03), (3, 0.03), (6, 0.03)])
def test_blocks_that_differ_by_chance_are_not_taken_for_a_gain(num_rounds: int, differ: float) -> None:
    """A shared machine has good and bad moments as long as a block."""
    inside = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        moments = [float(np.exp(differ * random.standard_normal())) for _ in range(40)]
        steps = rounds(speedup=1.0, noise=0.05, seed=seed, num_rounds=num_rounds)
        found = compare(
            [replace(each, step_s=each.step_s * moments[each.block]) for each in steps],
            label="cached",
            baseline="real",
        )
        assert found is not None
        inside += found.speedup_low <= 1 <= found.speedup_high
    assert inside >= 54


def test_slow_drift_cancels_between_the_arms_of_a_round() -> None:
    """The machine gets 3 times slower while it is measured; the arms are told apart to a few percent."""
    found = compare(rounds(speedup=1.2, noise=0.01, seed=1, drift=0.1), label="cached", baseline="real")
    assert found is not None
    assert found.speedup_low > 1.15
    assert found.speedup_high < 1.25


def test_steps_that_are_not_kept_count_nowhere() -> None:
    steps = rounds(speedup=1.5, noise=0.0, seed=0)
    hiccups = [step(500 + each.block, each.arm, each.block, 99.0, kept=False) for each in steps]
    assert compare([*steps, *hiccups], label="cached", baseline="real") == compare(
        steps, label="cached", baseline="real"
    )


def test_one_round_is_judged_by_its_steps() -> None:
    found = compare(rounds(speedup=2.0, noise=0.1, seed=0, num_rounds=1), label="cached", baseline="real")
    assert found is not None
    assert found.num_blocks == 1
    assert found.speedup_low < found.speedup < found.speedup_high


def test_a_single_difference_between_long_steps_leaves_a_large_gain_proven() -> None:
    """One step of ten seconds a block, of which one took half as long again."""
    paces_s = [("one-batch", 10.0), ("block", 0.2), ("one-batch", 15.0), ("other", 1.0), ("one-batch", 10.0)]
    steps = [step(number, arm, number, pace_s) for number, (arm, pace_s) in enumerate(paces_s)]
    found = compare(steps, label="block", baseline="one-batch")
    assert found is not None
    assert 10 < found.speedup_low < found.speedup < found.speedup_high < 400


def test_a_block_is_compared_with_what_ran_right_before_and_after_it() -> None:
    paces_s = {"real": [0.10, 0.12, 0.30], "knock-out a.py:3": [0.05, 0.06]}
    steps = [step(i, "real", 2 * i, pace_s) for i, pace_s in enumerate(paces_s["real"])]
    steps += [
        step(9 + i, "knock-out a.py:3", 1 + 2 * i, s) for i, s in enumerate(paces_s["knock-out a.py:3"])
    ]
    found = compare(steps, label="knock-out a.py:3", baseline="real", kind="knock-out")
    assert found is not None
    assert (found.kind, found.num_blocks) == ("knock-out", 2)
    assert found.baseline_step_s == pytest.approx((0.11 + 0.21) / 2)


def test_what_ran_long_before_is_no_baseline() -> None:
    assert compare([step(0, "real", 0, 0.1), step(1, "half", 3, 0.1)], label="half", baseline="real") is None


def test_an_arm_that_never_ran_gives_no_counterfactual() -> None:
    assert compare(rounds(speedup=2.0, noise=0.0, seed=0), label="half", baseline="cached") is None


def test_the_same_steps_give_the_same_interval() -> None:
    steps = rounds(speedup=1.4, noise=0.1, seed=3)
    assert compare(steps, label="cached", baseline="real") == compare(steps, label="cached", baseline="real")


@given(values=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_a_spread_orders_its_figures(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found.num == len(values)
    assert found.median_s <= found.p95_s <= found.max_s == max(values)
    assert min(values) <= found.mean_s * (1 + 1e-9)
    assert found.mean_s <= max(values) * (1 + 1e-9)


def test_no_values_have_no_spread() -> None:
    assert spread([]) is None


def test_an_evaluation_inside_a_step_is_an_outlier() -> None:
    steps = [step(i, "real", 0, 0.1) for i in range(8)]
    steps[5] = step(5, "real", 0, 0.5)
    assert outliers(steps) == {5}


def test_a_long_wait_is_no_outlier() -> None:
    """Workers deliver in bursts; what the loader costs must stay in the mean."""
    steps = [step(i, "real", 0, 0.1) for i in range(8)]
    steps[5] = step(5, "real", 0, 0.9, wait_s=0.8)
    assert outliers(steps) == set()


def test_each_arm_is_judged_by_its_own_steps() -> None:
    real = [step(i, "real", 0, 1.0) for i in range(4)]
    half = [step(4 + i, "half", 1, 0.1) for i in range(4)]
    assert outliers([*real, *half]) == set()


def test_slow_steps_of_a_busy_machine_are_no_outliers_of_the_luckier_arm() -> None:
    """Half of all steps are preempted, by chance fewer of one arm: nothing is left out of either."""
    lucky = [step(i, "real", 0, 0.7 if i % 5 < 2 else 0.1) for i in range(20)]
    unlucky = [step(20 + i, "same", 1, 0.7 if i % 5 < 3 else 0.1) for i in range(20)]
    assert outliers([*lucky, *unlucky]) == set()


def test_a_handful_of_steps_has_no_outliers() -> None:
    assert outliers([step(0, "real", 0, 0.1), step(1, "real", 0, 0.1), step(2, "real", 0, 9.0)]) == set()


def test_a_bootstrap_covers_the_mean_and_draws_as_many_as_it_is_told() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = bootstrap_interval(lambda drawn: values[drawn].mean(1), num_values=400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert (low, high) == bootstrap_interval(lambda drawn: values[drawn].mean(1), num_values=400)
    shapes: list[tuple[int, ...]] = []
    bootstrap_interval(
        lambda drawn: shapes.append(drawn.shape) or drawn.mean(1), num_values=9, num_drawn=4, num_resamples=7
    )
    assert shapes == [(7, 4)]


def test_a_step_far_longer_than_the_others_is_left_out() -> None:
    assert typical_steps([0.1, 0.1, 5.0, 0.11, 0.29]) == [0, 1, 3, 4]
    assert typical_steps([0.1, 5.0]) == [0, 1]  # too few to say what is usual
