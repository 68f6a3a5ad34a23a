"""One run for all its browsers: shared bytes, and for each just what it has not seen."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample, charted_figures
from flatout.monitor.verdicts.verdict import verdicts
from flatout.monitor.web.run_stream import (
    MOST_OLDER,
    MOST_RECENT,
    SLACK,
    VERDICT_EVERY_S,
    Past,
    RunStream,
    StreamPosition,
    event,
    history_json,
    identity_of,
    sample_document,
    thin,
    time_of,
)
from tests.support.monitor_web import HOSTILE, START_S, sample


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
    assert stream.position == StreamPosition(count=0, time_s=None)
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
    samples = [small_sample(second, cpu=second % 2) for second in range(100)]
    thinned = thin(samples, most=10)
    assert [one.host.cpu_share for one in thinned] == [pytest.approx(0.5, abs=0.1)] * len(thinned)


def test_what_is_merged_keeps_its_lowest_and_highest() -> None:
    """Also where slots are merged again and again."""
    past = Past()
    for second in range(9000):
        past.add(small_sample(second, cpu=0.9 if second == 100 else 0.1 if second == 2000 else 0.5))
    text = history_json(past.samples, is_whole=True, latest={})
    document = json.loads(text)
    rows = len(document["at_s"])
    assert len(document["low"]["host/cpu_share"]) == len(document["columns"]["host/cpu_share"]) == rows
    assert max(value or 0 for value in document["high"]["host/cpu_share"]) == 0.9
    assert min(value or 1 for value in document["low"]["host/cpu_share"]) == 0.1
    assert document["high"]["host/cpu_share"][-1] is None  # the last minutes are as they were sampled


def test_a_change_of_speed_is_told() -> None:
    stream = RunStream("a", [sample(second, steps_per_s=6 if second < 108 else 3.6) for second in range(300)])
    _, document = parsed(stream.whole())
    assert "slower since 1:4" in document["change"]  # type: ignore[index]


# Events: one line of JSON whatever the texts hold, and columns with nulls where nothing is known


def parsed(sent: bytes) -> tuple[dict[str, str], object]:
    assert sent.endswith(b"\n\n")
    lines = sent.decode("ascii")[:-2].split("\n")
    fields = dict(line.split(": ", 1) for line in lines)
    return fields, json.loads(fields["data"], parse_constant=pytest.fail)


@given(st.text(), st.floats())
def test_any_text_and_any_number_stay_within_one_event(text: str, number: float) -> None:
    fields, data = parsed(event("sample", {"name": text, "figures": [number]}))
    assert fields.keys() == {"event", "data"}
    assert isinstance(data, dict)
    shown = data["figures"][0]
    assert shown == number or shown in ("nan", "inf", "-inf")
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert data["name"] == text


def test_the_id_is_the_time_and_comes_back() -> None:
    assert time_of(identity_of(1700000000.1234)) == 1700000000.123


@pytest.mark.parametrize("given_id", [None, "", "-1", "1e9", "nan", "१२", "9" * 40, "1 2", "'"])
def test_an_id_that_is_none_of_ours_is_no_time(given_id: str | None) -> None:
    assert time_of(given_id) is None


def test_a_sample_is_sent_without_what_is_unknown() -> None:
    one = sample(3, name=HOSTILE)
    document = sample_document(one, run="key", verdicts=verdicts([one]))
    assert document["run"] == "key"
    assert document["sample"]["time_s"] == START_S + 3
    assert document["sample"]["job"]["name"] == HOSTILE
    assert "sm_occupancy_share" not in document["sample"]["gpus"][0]
    assert document["verdicts"][0]["bound"] == "unknown"
    parsed(event("sample", document))


def test_a_loss_that_is_no_number_is_sent_by_its_name() -> None:
    one = Sample(time_s=1.0, job=JobSample(pid=1, loss=float("inf")))
    _, data = parsed(event("sample", sample_document(one, run="r", verdicts=())))
    assert isinstance(data, dict)
    assert data["sample"]["job"]["loss"] == "inf"
    assert "job/loss" not in dict(charted_figures(one))


def test_phases_that_were_not_measured_have_no_column() -> None:
    one = Sample(time_s=1.0, job=JobSample(pid=1, phases={"wait": 0.0, "rest": 1.0}))
    columns = json.loads(history_json([one], is_whole=True, latest={}))["columns"]
    assert columns.keys() == {"job/phases/wait", "job/phases/rest"}


def test_columns_have_a_value_or_null_for_every_time() -> None:
    first = sample(0)
    without_gpu = replace(sample(1), gpus=())
    late = replace(sample(60), gpus=(GpuSample(index=1, mig_index=2, power_w=70.0),))
    document = json.loads(history_json([first, without_gpu, late], is_whole=True, latest={"run": "r"}))
    assert document["run"] == "r"
    assert document["start_s"] == START_S
    # The hole of a minute is a row of its own, half-way.
    assert document["at_s"] == [0.0, 1.0, 30.0, 60.0]
    columns = document["columns"]
    assert {len(values) for values in columns.values()} == {4}
    assert columns["gpu/1.2/power_w"] == [None, None, None, 70.0]
    assert columns["gpu/0/power_w"][0] == pytest.approx(first.gpus[0].power_w, rel=1e-3)
    assert columns["gpu/0/power_w"][1:] == [None, None, None]
    assert columns["host/cpu_share"][2] is None
    assert sum(columns[f"job/phases/{phase}"][0] for phase in first.job.phases) == pytest.approx(1, rel=1e-3)  # type: ignore[union-attr]


def test_an_empty_history_is_a_document_too() -> None:
    document = json.loads(history_json([], is_whole=True, latest={"run": "r", "sample": None}))
    assert document["at_s"] == []
    assert document["columns"] == {}


def test_notes_travel_with_their_time() -> None:
    samples = [sample(0), sample(1, notes=("GPU 0 is lost", HOSTILE))]
    document = json.loads(history_json(samples, is_whole=False, latest={}))
    assert document["notes"] == [[START_S + 1, "GPU 0 is lost"], [START_S + 1, HOSTILE]]


def test_a_history_is_compact() -> None:
    """Two bytes for a separator and few for a figure: a chart has no more than four digits."""
    samples = [sample(second) for second in range(600)]
    sent = history_json(samples, is_whole=True, latest={})
    num_values = sum(len(values) for values in json.loads(sent)["columns"].values())
    assert len(sent) / num_values < 10


def test_what_is_unknown_is_not_charted() -> None:
    assert dict(charted_figures(Sample(time_s=1.0, host=HostSample(cpu_share=None)))) == {}
