"""A lasting change of speed is found and dated; waves, drifts, pauses and starts are none."""

from __future__ import annotations

import math
import random

import pytest

from flatout.monitor.verdicts.change import RatePoint, find_change


def points(rates: list[float], *, span_s: float = 1.0, noise: float = 0.01) -> list[RatePoint]:
    rng = random.Random(0)
    return [
        (100.0 + span_s * i, span_s, rate * rng.uniform(1 - noise, 1 + noise))
        for i, rate in enumerate(rates, 1)
    ]


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([10.0] * 108 + [6.0] * 150, "40 % slower since 1:48"),
        ([4.0] * 600 + [5.0] * 90, "25 % faster since 10:00"),
    ],
)
def test_a_change_that_lasts_is_found(rates: list[float], words: str) -> None:
    assert str(find_change(points(rates), start_s=100.0)) == words


def test_a_change_is_found_through_noise() -> None:
    change = find_change(points([10.0] * 300 + [6.0] * 300, noise=0.2), start_s=100.0)
    assert change is not None
    assert abs(change.since_s - 300) < 5


def test_points_of_different_lengths_are_one_run() -> None:
    old = points([10.0] * 120, span_s=60.0)
    end_s = old[-1][0]
    new = [(end_s + time_s - 100.0, span_s, rate) for time_s, span_s, rate in points([5.0] * 300)]
    change = find_change([*old, *new], start_s=100.0)
    assert str(change) == "50 % slower since 2:00:00"


@pytest.mark.parametrize(
    "rates",
    [
        [10.0] * 300,
        [10.0 + math.sin(i / 20) for i in range(300)],
        [10.0] * 100 + [2.0] * 20 + [10.0] * 100,  # it is over
        [10.0 - i / 100 for i in range(300)],
        [2.0] * 10 + [10.0] * 300,  # a start
        [10.0] * 300 + [5.0] * 20,  # too short to be sure
        [10.0] * 5,
        [10.0] * 100 + [9.5] * 100,
    ],
)
def test_what_is_no_change(rates: list[float]) -> None:
    for noise in (0.01, 0.05):
        assert find_change(points(rates, noise=noise), start_s=100.0) is None
