"""However long a run, what is kept of it is bounded, in order, and finest at its end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.monitor.sample import HostSample, ProcessSample, Sample
from flatout.monitor.web.thinning import MOST_OLDER, MOST_RECENT, SLACK, Past, thin


def sample(second: float, *, cpu: float = 0.5) -> Sample:
    return Sample(
        time_s=second,
        span_s=1.0,
        host=HostSample(cpu_share=cpu, memory_used_bytes=int(second)),
        processes=(ProcessSample(pid=1),),
    )


def test_a_long_run_is_kept_in_few_samples_the_last_ten_minutes_whole() -> None:
    past = Past()
    for second in range(5000):
        past.add(sample(second))
        assert len(past.samples) <= MOST_OLDER + MOST_RECENT + SLACK
    times = [one.time_s for one in past.samples]
    assert times == sorted(times)
    assert times[-600:] == [4400.0 + second for second in range(600)]
    assert times[0] < 100
    assert all(not one.processes for one in past.samples)


def test_at_ten_samples_a_second_the_number_is_bounded_too() -> None:
    past = Past()
    for tick in range(4000):
        past.add(sample(tick / 10))
    assert len(past.samples) <= MOST_OLDER + MOST_RECENT + SLACK
    assert past.samples[-1].time_s == 399.9


def test_a_past_made_of_many_samples_is_as_short_as_one_that_grew() -> None:
    assert len(Past(sample(second) for second in range(5000)).samples) <= MOST_OLDER + 600 + 1


def test_what_comes_after_a_time() -> None:
    past = Past(sample(second) for second in range(10))
    assert [one.time_s for one in past.after(6.5)] == [7.0, 8.0, 9.0]
    assert past.after(9.0) == []
    assert len(past.after(-1.0)) == 10


def test_a_clock_that_was_set_back_goes_on_from_there() -> None:
    past = Past(sample(second) for second in range(10))
    past.add(sample(4.0, cpu=0.9))
    assert [one.time_s for one in past.samples] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert past.samples[-1].host.cpu_share == 0.9


@settings(max_examples=40)
@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=120), st.integers(1, 30))
def test_thinning_keeps_the_order_the_end_and_the_mean(gaps: list[float], most: int) -> None:
    times = list(itertools.accumulate(gaps))
    samples = [sample(time_s, cpu=number % 2) for number, time_s in enumerate(times)]
    thinned = thin(samples, most=most)
    assert len(thinned) <= most or len(samples) <= most
    assert [one.time_s for one in thinned] == sorted(one.time_s for one in thinned)
    assert thinned[-1].time_s == times[-1]
    assert max(one.host.memory_used_bytes or 0 for one in thinned) == int(times[-1])


def test_a_slot_holds_the_mean_of_its_samples() -> None:
    thinned = thin([sample(second, cpu=second % 2) for second in range(100)], most=10)
    assert [one.host.cpu_share for one in thinned] == [pytest.approx(0.5, abs=0.1)] * len(thinned)
