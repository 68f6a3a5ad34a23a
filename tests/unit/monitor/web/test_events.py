"""Events: one line of JSON whatever the texts hold, and columns with nulls where nothing is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.verdicts.verdict import verdicts
from flatout.monitor.web.events import (
    charted,
    event,
    history_json,
    identity_of,
    sample_document,
    time_of,
)
from tests.support.monitor_web import HOSTILE, START_S, sample


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
    assert "job/loss" not in dict(charted(one))


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
    num_values = sum(1 for one in samples for _ in charted(one))
    assert len(sent) / num_values < 10


def test_what_is_unknown_is_not_charted() -> None:
    assert dict(charted(Sample(time_s=1.0, host=HostSample(cpu_share=None)))) == {}
