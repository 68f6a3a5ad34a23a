"""One run for all its browsers: shared bytes, and for each just what it has not seen."""

from __future__ import annotations

import itertools
import json
from typing import Any

from flatout.monitor.web.run_stream import VERDICT_EVERY_S, Position, Stream
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
    stream = Stream("r", [sample(second) for second in range(6)])
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
    stream = Stream("r", [sample(second) for second in range(6)])
    here = stream.position
    for second in range(6, 100):
        stream.extend([sample(second)])
    [(name, document)] = documents(stream.since(here))
    assert name == "history"
    assert not document["is_whole"]
    assert times(document) == [float(second) for second in range(6, 100)]
    assert document["sample"]["time_s"] == START_S + 99


def test_the_first_history_is_whole_and_shared_until_there_is_more() -> None:
    stream = Stream("r", [sample(second) for second in range(6)])
    sent = stream.since(None)
    assert sent is stream.whole()
    assert b"id: " not in sent
    [(_, document)] = documents(sent)
    assert document["is_whole"]
    assert times(document) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    stream.extend([sample(6)])
    assert stream.whole() is not sent


def test_a_browser_that_comes_again_gets_what_overlaps_and_what_follows() -> None:
    stream = Stream("r", [sample(second) for second in range(100)])
    [(_, document)] = documents(stream.again(START_S + 80))
    assert not document["is_whole"]
    assert times(document)[0] > 49.0
    assert times(document)[-1] == 99.0


def test_after_the_clock_was_set_back_everything_is_sent() -> None:
    stream = Stream("r", [sample(second) for second in range(50)])
    here = stream.position
    stream.extend([sample(10), sample(11)])
    [(_, document)] = documents(stream.since(here))
    assert document["is_whole"]
    assert times(document)[-1] == 11.0


def test_a_run_without_samples_says_so() -> None:
    stream = Stream("r")
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
    stream = Stream("r", [sample(second) for second in range(30)])
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
