from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from flatout.tuner.check.answer import changes, grown, judge, judge_gain, reason_of, slowdown_of
from flatout.tuner.trial.counts import Counts
from flatout.tuner.verdict import Gain, gain_of
from tests.unit.tuner.test_verdict import trial

COUNTS = Counts(
    launches=100, waits=1, copied_bytes=None, peak_bytes=1 << 20, parameter_groups=2, graph_breaks=0,
    recompilations=0,
)  # fmt: skip


def answer_of(chance: random.Random, *, slower: float, noise: float = 0.02, most: int = 8) -> str:
    """Add pairs until the answer is settled, as a check does."""
    pairs = []
    while True:
        times = [0.1 * math.exp(chance.gauss(0, noise)) for _ in range(2)]
        pairs.append((trial(times[0]), trial(times[1] * slower)))
        answer = judge(slowdown_of(gain_of(pairs)), tolerance=0.05)
        if answer != "cannot tell" or len(pairs) == most:
            return answer


def test_three_answers_over_a_thousand_checks_on_a_machine_whose_runs_vary_by_two_percent() -> None:
    chance = random.Random(7)
    same = [answer_of(chance, slower=1.0) for _ in range(1000)]
    assert same.count("slower") <= 5 and same.count("ok") > 900
    slower = [answer_of(chance, slower=1.15) for _ in range(1000)]
    assert slower.count("ok") <= 5 and slower.count("slower") > 900
    noisy = [answer_of(chance, slower=1.05, noise=0.2) for _ in range(200)]
    assert noisy.count("cannot tell") > 150


def test_the_smallest_change_is_half_the_interval_and_stands_in_the_reason() -> None:
    gain = Gain(ratio=1.0, low=1 / 1.08, high=1.08, num_pairs=8, best=1.0)
    slowdown = slowdown_of(gain)
    assert (slowdown.low, slowdown.high) == (pytest.approx(1 / 1.08), pytest.approx(1.08))
    assert slowdown.smallest == pytest.approx(0.08)
    assert judge(slowdown, tolerance=0.05) == "cannot tell"
    assert "show changes of 8 % or more" in reason_of("cannot tell", slowdown, tolerance=0.05)
    assert judge(slowdown, tolerance=0.1) == "ok" and "less than 1.1" in reason_of(
        "ok", slowdown, tolerance=0.1
    )
    assert judge(replace(slowdown, num_pairs=3), tolerance=0.1) == "cannot tell"


def test_a_gain_must_be_left() -> None:
    gain = Gain(ratio=1.5, low=1.4, high=1.6, num_pairs=4, best=1.5)
    assert judge_gain(gain, needed=1.3) == "ok"
    assert judge_gain(gain, needed=1.7) == "slower"
    assert judge_gain(gain, needed=1.5) == judge_gain(replace(gain, num_pairs=3), needed=1.3) == "cannot tell"


def test_counts_that_differ_are_named_and_a_gpu_on_one_side_is_not_a_change() -> None:
    head = replace(COUNTS, launches=100.5, waits=3, peak_bytes=1 << 19, copied_bytes=800.0)
    found = changes(COUNTS, head)
    assert [str(each) for each in found] == ["waits 1 → 3", "peak bytes 1.00 MiB → 512 KiB"]
    assert grown(found) == ["waits 1 → 3"]
    assert changes(COUNTS, None) == changes(COUNTS, COUNTS) == ()
    assert [each.name for each in changes(COUNTS, replace(COUNTS, graph_breaks=1))] == ["graph_breaks"]
