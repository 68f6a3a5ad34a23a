"""One run for all its browsers: shared bytes, and for each just what it has not seen."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.monitor.sample import HostSample, ProcessSample, Sample
from flatout.monitor.web.run_stream import (
    MOST_OLDER,
    MOST_RECENT,
    SLACK,
    VERDICT_EVERY_S,
    Past,
    Position,
    RunStream,
    thin,
)
from tests.support.monitor_web import START_S, sample


def documents(sent: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in sent.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def times(document: Any) -> list[float]:
    return [document["start_s"] - START_S + at_s for at_s in document["at_s"]]


def test_a_browser_that_keeps_up_gets_the_shared_bytes_of_each_sample() -> None:
    stream = RunStream("r", [sample(second) for second in range(6)])
    here = stream.position
    assert stream.since(here) == b""
    stream.extend([sample(6)])
    sent = stream.since(here)
    assert sent is stream.since(here)
    [(name, document)] = documents(sent)
    assert name == "sample"
    assert document["sample"]["time_s"] == START_S + 6
    assert f"id: {round((START_S + 6) * 1000)}\n".encode() in sent
    assert stream.since(stream.position) == b""


def test_a_browser_that_fell_behind_gets_all_it_missed_in_one_event() -> None:
    stream = RunStream("r", [sample(second) for second in range(6)])
    here = stream.position
    for second in range(6, 100):
        stream.extend([sample(second)])
    [(name, document)] = documents(stream.since(here))
    assert name == "history"
    assert not document["is_whole"]
    assert times(document) == [float(second) for second in range(6, 100)]
    assert document["sample"]["time_s"] == START_S + 99


def test_the_first_history_is_whole_and_shared_until_there_is_more() -> None:
    stream = RunStream("r", [sample(second) for second in range(6)])
    sent = stream.since(None)
    assert sent is stream.whole()
    assert b"id: " not in sent
    [(_, document)] = documents(sent)
    assert document["is_whole"]
    assert times(document) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    stream.extend([sample(6)])
    assert stream.whole() is not sent


def test_a_browser_that_comes_again_gets_what_overlaps_and_what_follows() -> None:
    stream = RunStream("r", [sample(second) for second in range(100)])
    [(_, document)] = documents(stream.again(START_S + 80))
    assert not document["is_whole"]
    assert times(document)[0] > 49.0
    assert times(document)[-1] == 99.0


def test_after_the_clock_was_set_back_everything_is_sent() -> None:
    stream = RunStream("r", [sample(second) for second in range(50)])
    here = stream.position
    stream.extend([sample(10), sample(11)])
    [(_, document)] = documents(stream.since(here))
    assert document["is_whole"]
    assert times(document)[-1] == 11.0


def test_a_run_without_samples_says_so() -> None:
    stream = RunStream("r")
    assert stream.position == Position(count=0, time_s=None)
    [(_, document)] = documents(stream.whole())
    assert document["sample"] is None
    assert document["at_s"] == []
    here = stream.position
    stream.extend([sample(0), sample(1)])
    [(_, document)] = documents(stream.since(here))
    assert document["is_whole"]
    assert times(document) == [0.0, 1.0]


def test_a_verdict_stays_long_enough_to_be_read() -> None:
    stream = RunStream("r", [sample(second) for second in range(30)])
    said = []
    for second in range(30, 42):
        here = stream.position
        stream.extend([sample(second, wait=0.3 + second / 200)])
        [(_, document)] = documents(stream.since(here))
        said.append(document["verdicts"][0]["sentence"])
    assert document["verdicts"][0]["bound"] == "data"
    changes = [number for number in range(1, 12) if said[number] != said[number - 1]]
    assert changes
    assert all(after - before >= VERDICT_EVERY_S for before, after in itertools.pairwise(changes))


# However long a run, what is kept of it is bounded, in order, and finest at its end


def small_sample(second: float, *, cpu: float = 0.5) -> Sample:
    return Sample(
        time_s=second,
        span_s=1.0,
        host=HostSample(cpu_share=cpu, memory_used_bytes=int(second)),
        processes=(ProcessSample(pid=1),),
    )


def test_a_long_run_is_kept_in_few_samples_the_last_ten_minutes_whole() -> None:
    past = Past()
    for second in range(5000):
        past.add(small_sample(second))
        assert len(past.samples) <= MOST_OLDER + MOST_RECENT + SLACK
    times = [one.time_s for one in past.samples]
    assert times == sorted(times)
    assert times[-600:] == [4400.0 + second for second in range(600)]
    assert times[0] < 100
    assert all(not one.processes for one in past.samples)


def test_at_ten_samples_a_second_the_number_is_bounded_too() -> None:
    past = Past()
    for tick in range(4000):
        past.add(small_sample(tick / 10))
    assert len(past.samples) <= MOST_OLDER + MOST_RECENT + SLACK
    assert past.samples[-1].time_s == 399.9


def test_a_past_made_of_many_samples_is_as_short_as_one_that_grew() -> None:
    assert len(Past(small_sample(second) for second in range(5000)).samples) <= MOST_OLDER + 600 + 1


def test_what_comes_after_a_time() -> None:
    past = Past(small_sample(second) for second in range(10))
    assert [one.time_s for one in past.after(6.5)] == [7.0, 8.0, 9.0]
    assert past.after(9.0) == []
    assert len(past.after(-1.0)) == 10


def test_a_clock_that_was_set_back_goes_on_from_there() -> None:
    past = Past(small_sample(second) for second in range(10))
    past.add(small_sample(4.0, cpu=0.9))
    assert [one.time_s for one in past.samples] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert past.samples[-1].host.cpu_share == 0.9


@settings(max_examples=40)
@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=120), st.integers(1, 30))
def test_thinning_keeps_the_order_the_end_and_the_mean(gaps: list[float], most: int) -> None:
    times = list(itertools.accumulate(gaps))
    samples = [small_sample(time_s, cpu=number % 2) for number, time_s in enumerate(times)]
    thinned = thin(samples, most=most)
    assert len(thinned) <= most or len(samples) <= most
    assert [one.time_s for one in thinned] == sorted(one.time_s for one in thinned)
    assert thinned[-1].time_s == times[-1]
    assert max(one.host.memory_used_bytes or 0 for one in thinned) == int(times[-1])


def test_a_slot_holds_the_mean_of_its_samples() -> None:
    thinned = thin([small_sample(second, cpu=second % 2) for second in range(100)], most=10)
    assert [one.host.cpu_share for one in thinned] == [pytest.approx(0.5, abs=0.1)] * len(thinned)
