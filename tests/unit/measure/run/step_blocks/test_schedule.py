from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.arms.arm import Arm
from flatout.measure.evidence import INSTRUMENTS, Counterfactual
from flatout.measure.run.step_blocks.schedule import (
    ENDED_FIRST,
    FEWEST_ROUNDS,
    LONGER,
    MOST_ROUNDS,
    NO_TIME,
    Rounds,
    WarmUp,
    last_steps,
    plan_passes,
    plan_rounds,
    steps_per_block,
)
from tests.support import doctor

steps_s = st.floats(min_value=1e-4, max_value=60.0)


@given(step_s=steps_s, seconds=st.floats(min_value=-5, max_value=3600))
def test_the_passes_before_the_arms_leave_them_time_and_the_others_come_later(
    step_s: float, seconds: float
) -> None:
    blocks, later = plan_passes(step_s, seconds=seconds)
    (real,) = [block for block in blocks if block.arm == "real"]
    assert real.num_steps > real.num_untimed
    first = [block.arm for block in blocks if block is not real]
    assert sorted(first + [block.arm for block in later]) == sorted(INSTRUMENTS)
    assert all(block.num_steps >= 1 for block in (*blocks, *later))
    if first:
        assert step_s * sum(block.num_steps for block in blocks) <= seconds
    if first and set(first) != set(INSTRUMENTS):
        assert blocks[0].arm == "stacks" and blocks[-1] is real  # the first arm's baseline


def test_with_time_every_instrument_has_its_pass_in_the_usual_order() -> None:
    blocks, later = plan_passes(0.01, seconds=60.0)
    assert ([block.arm for block in blocks], later) == (["real", *INSTRUMENTS], [])


@pytest.mark.parametrize(
    ("step_s", "seconds", "device", "first"),
    [
        (10.9, 260.0, "cuda", ["stacks", "count", "real"]),
        (3.0, 45.0, "cpu", ["stacks", "count", "real"]),
        (3.0, 28.0, "cpu", ["stacks", "real"]),
        (3.0, 11.0, "cpu", ["real"]),  # no arm could end in time
        (0.01, 5.0, "cuda", ["stacks", "count", "real"]),
        (0.01, 11.0, "cuda", ["stacks", "count", "kernels", "real"]),  # by which arms of a GPU are chosen
    ],
)
def test_with_long_steps_or_little_time_the_arms_come_before_most_passes(
    step_s: float, seconds: float, device: str, first: list[str]
) -> None:
    blocks, later = plan_passes(step_s, seconds=seconds, device=device)
    assert [block.arm for block in blocks] == first
    assert {block.arm for block in later} == set(INSTRUMENTS) - set(first)
    looks = sum(block.num_steps for block in blocks if block.arm == "stacks")
    assert step_s * looks <= max(step_s, 0.1 * seconds)


@given(step_s=steps_s, seconds=st.floats(min_value=0.1, max_value=3600))
def test_fixed_rounds_are_interleaved(step_s: float, seconds: float) -> None:
    blocks = plan_rounds(step_s, seconds=seconds, labels=["cached", "half"])
    num_rounds = len(blocks) // 3
    assert FEWEST_ROUNDS <= num_rounds <= MOST_ROUNDS
    assert [block.arm for block in blocks] == ["real", "cached", "half"] * num_rounds
    assert {block.num_steps for block in blocks} == {steps_per_block(step_s)}


@given(slower=steps_s, faster=steps_s)
def test_longer_steps_never_mean_more_steps(slower: float, faster: float) -> None:
    faster, slower = sorted((faster, slower))
    assert 2 <= steps_per_block(slower) <= steps_per_block(faster)


# -- which arm runs next


class Gains(Arm):
    """An arm with a known speed-up."""

    kind = "knock-out"

    def __init__(
        self, label: str, speedup: float = 2.0, *, within: tuple[Arm, ...] = (), **fields: Any
    ) -> None:
        self.label, self.speedup, self._within = label, speedup, within
        vars(self).update(fields)

    def refine(self) -> tuple[Arm, ...]:
        return self._within


def run(
    arms: list[Arm], *, seconds: float = 60.0, step_s: float = 0.01, width: float = 0.0, **options: Any
) -> Any:
    """(labels in the order in which they ran, the rounds), every arm measured as it is known."""
    rounds = Rounds(arms, step_s=step_s, seconds=seconds, **options)
    ran: list[str] = []

    def measure(arm: Any) -> Counterfactual:
        speedups = {"speedup_low": arm.speedup - width, "speedup_high": arm.speedup + width}
        made = replace(doctor.counterfactuals()[0], label=arm.label, speedup=arm.speedup, **speedups)
        return replace(made, num_blocks=ran.count(arm.label))

    left_s = seconds
    while block := rounds.next(seconds_left=left_s, measure=measure):
        ran.append(block.arm)
        left_s -= (
            step_s * block.num_steps / next((arm.speedup for arm in arms if arm.label == block.arm), 1.0)
        )
        assert left_s > -2 * step_s * steps_per_block(step_s)
    return ran, rounds


def test_the_most_suspicious_arm_comes_first_and_each_stands_beside_its_baseline() -> None:
    ran, _ = run([Gains("a", suspicion=0.1), Gains("b", suspicion=0.5), Gains("c", suspicion=0.3)])
    assert ran[:5] == ["real", "b", "c", "real", "a"]
    for place, label in enumerate(ran[:-1]):
        assert label == "real" or "real" in (ran[place - 1], ran[place + 1])


def test_an_arm_that_may_prove_a_cause_comes_before_the_parts_of_a_block() -> None:
    parts = (Gains("part", suspicion=0.6), Gains("other part", suspicion=0.5))
    arms = [Gains("block", suspicion=0.7, within=parts), Gains("cached", suspicion=0.16)]
    ran, _ = run([*arms, Gains("small", suspicion=0.02)])
    order = sorted(set(ran) - {"real"}, key=ran.index)
    assert order == ["block", "cached", "part", "other part", "small"]


def test_what_gains_gets_rounds_until_its_interval_is_narrow() -> None:
    ran, _ = run([Gains("gains"), Gains("nothing", 1.0)])
    assert (ran.count("gains"), ran.count("nothing")) == (FEWEST_ROUNDS, 1)
    ran, _ = run([Gains("suspicious", 1.0, suspicion=0.5)])
    assert ran.count("suspicious") == FEWEST_ROUNDS
    ran, _ = run([Gains("gains"), Gains("nothing", 1.0)], width=0.3)
    assert (ran.count("gains"), ran.count("nothing")) == (MOST_ROUNDS, 1)


def test_what_frees_most_gets_its_rounds_first_however_little_time_there_is() -> None:
    arms: list[Arm] = [Gains(str(i), 1.2, suspicion=0.9) for i in range(8)]
    ran, _ = run([*arms, Gains("best", 10.0, suspicion=0.91)], seconds=60.0, step_s=1.0, width=0.01)
    assert ran.count("best") == FEWEST_ROUNDS


def test_where_only_one_arm_fits_it_runs_alone() -> None:
    ran, _ = run(
        [Gains("a", 30.0, suspicion=0.97), Gains("b", suspicion=0.9)], seconds=4.0, step_s=3.0, last="real"
    )
    assert ran == ["a"]


def test_after_a_pass_of_an_instrument_a_baseline_comes_first_again() -> None:
    rounds = Rounds([Gains("a"), Gains("b")], step_s=0.01, seconds=60.0, last="real")
    options = {"seconds_left": 60.0, "measure": lambda arm: None}
    assert rounds.next(**options).arm == "a"  # beside the real block that ran last
    rounds.interrupt()
    assert rounds.next(**options).arm == "real"


def test_the_block_of_a_fast_arm_lasts_as_long_as_those_beside_it() -> None:
    rounds = Rounds([Gains("fast", 3.0), Gains("free", 50.0)], step_s=0.01, seconds=60.0)
    measured = replace(doctor.counterfactuals()[0], speedup_low=1.0)
    lengths: dict[str, list[int]] = {"real": [], "fast": [], "free": []}
    for _ in range(6):
        block = rounds.next(
            seconds_left=60.0, measure=lambda arm: replace(measured, label=arm.label, speedup=arm.speedup)
        )
        lengths[block.arm].append(block.num_steps - 1)
    usual = lengths["real"][0]
    assert set(lengths["real"]) == {usual}
    assert lengths["fast"] == [usual, 3 * usual]
    assert lengths["free"] == [usual, LONGER * usual]


def test_an_arm_may_ask_for_rounds_though_it_gains_nothing() -> None:
    ran, _ = run([Gains("cached", 1.0, fewest_rounds=3)])
    assert ran.count("cached") == 3


def test_an_arm_on_kept_batches_stands_beside_steps_on_kept_batches() -> None:
    ran, _ = run([Gains("cached", suspicion=1.0), Gains("half", baseline="cached", suspicion=0.9)])
    assert ran[:3] == ["real", "cached", "half"]
    assert all(
        "cached" in (ran[place - 1], ran[place + 1])
        for place in range(2, len(ran) - 1)
        if ran[place] == "half"
    )


def test_an_arm_that_only_served_as_a_baseline_is_still_to_be_compared() -> None:
    arms = [Gains(str(i), suspicion=0.9, baseline="cached") for i in range(8)]
    ran, _ = run([*arms, Gains("cached", suspicion=0.1)], width=0.01)
    assert ("real", "cached") in set(itertools.pairwise(ran))


def test_a_baseline_of_long_steps_is_a_single_timed_step() -> None:
    one_batch = Gains("one-batch", only_baseline=True)
    arms = [Gains("block", suspicion=0.9, baseline="one-batch"), Gains("other", suspicion=0.8), one_batch]
    rounds = Rounds(arms, step_s=12.0, seconds=99.0)
    blocks = [rounds.next(seconds_left=60.0, measure=lambda arm: None) for _ in range(4)]
    sizes = [(block.arm, block.num_steps, block.num_untimed) for block in blocks if block is not None]
    assert sizes == [("one-batch", 1, 0), ("block", 2, 1), ("real", 1, 0), ("other", 2, 1)]
    short = Rounds([Gains("block")], step_s=0.01, seconds=60.0)
    block = short.next(seconds_left=60.0, measure=lambda arm: None)
    assert block is not None and (block.num_steps, block.num_untimed) == (steps_per_block(0.01), 1)


def test_arms_within_an_arm_are_tried_where_it_gains() -> None:
    ran, _ = run([Gains("outer", within=(Gains("inner"),)), Gains("idle", 1.0, within=(Gains("never"),))])
    assert "inner" in ran and "never" not in ran


def test_what_there_is_no_time_for_is_named() -> None:
    ran, rounds = run([Gains(str(i), suspicion=1 / (1 + i)) for i in range(9)], seconds=12.0, step_s=1.0)
    assert ran[:3] == ["real", "0", "1"]
    not_run = rounds.not_run(measured=set(ran))
    assert [arm.label for arm in not_run] == [str(i) for i in range(9) if str(i) not in ran]
    assert {arm.reason for arm in not_run} == {NO_TIME}


def test_a_job_that_ended_first_is_why_an_arm_has_no_figure() -> None:
    ran, rounds = run([Gains("ran"), Gains("refused", refusal="a generator")], seconds=12.0, step_s=1.0)
    assert "ran" in ran
    reasons = {arm.label: arm.reason for arm in rounds.not_run(measured=(), job_ended=True)}
    assert reasons == {"ran": ENDED_FIRST, "refused": "a generator"}


def test_an_arm_that_refuses_or_is_skipped_does_not_run_nor_what_needs_it() -> None:
    arms = [Gains("a", refusal="a generator"), Gains("cached"), Gains("half", baseline="cached"), Gains("b")]
    ran, rounds = run(arms, skipped={"cached": "the script failed under it"})
    assert set(ran) == {"real", "b"}
    assert {arm.label: arm.reason for arm in rounds.not_run(measured=["b"])} == {
        "a": "a generator",
        "cached": "the script failed under it",
        "half": "it is compared with cached steps: the script failed under it",
    }


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


@pytest.mark.parametrize(
    ("num_seen", "seen_s", "seconds_left", "more"),
    [
        (4, 0.4, 50.0, 26),  # three seconds are enough
        (4, 0.06, 50.0, 196),  # and so are two hundred steps
        (4, 0.004, 50.0, 1996),  # short ones last two seconds, for enough samples of the stack
        (4, 0.0004, 50.0, 2996),  # or are very many
        (4, 0.4, 1.0, 10),  # that is all the time there is
        (4, 8.0, 50.0, 0),
        (0, 0.0, 50.0, 0),
    ],
)
def test_a_run_in_which_few_steps_were_seen_sees_more(
    num_seen: int, seen_s: float, seconds_left: float, more: int
) -> None:
    assert last_steps(num_seen, seen_s=seen_s, seconds_left=seconds_left) == more
