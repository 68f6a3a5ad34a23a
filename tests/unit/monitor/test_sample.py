"""A Sample is one JSON document that says what it does not know."""

from __future__ import annotations

import json
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.monitor.sample import (
    MOST_NOTES,
    GpuSample,
    HostSample,
    JobSample,
    ProcessSample,
    Sample,
    drop_older,
    last_seconds,
    lean,
    merge,
)

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
counts = st.none() | st.integers(0, 2**50)
gpus = st.builds(
    GpuSample,
    index=st.integers(0, 15),
    name=st.none() | st.text(),
    utilisation_share=numbers,
    memory_used_bytes=counts,
    throttle_reasons=st.none() | st.lists(st.text()).map(tuple),
    lost=st.booleans(),
)
jobs = st.builds(
    JobSample,
    pid=st.integers(1, 99999),
    state=st.sampled_from(["running", "stopped", "ended", "died"]),
    loss=numbers,
    phases=st.none() | st.dictionaries(st.sampled_from(["wait", "rest"]), st.floats(0, 1)),
    visible_gpus=st.none() | st.lists(st.integers(0, 7)).map(tuple),
)
samples = st.builds(
    Sample,
    time_s=st.floats(0, 2e9),
    span_s=numbers,
    host=st.builds(HostSample, cpu_share=numbers, memory_used_bytes=counts),
    gpus=st.lists(gpus, max_size=3).map(tuple),
    processes=st.lists(st.builds(ProcessSample, pid=st.integers(1, 99), sm_share=numbers), max_size=2).map(
        tuple
    ),
    job=st.none() | jobs,
    notes=st.lists(st.text(), max_size=2).map(tuple),
)


@given(sample=samples)
def test_a_sample_survives_json_whole(sample: Sample) -> None:
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


@given(sample=samples)
def test_a_lean_sample_means_the_same_but_for_lists_that_are_empty(sample: Sample) -> None:
    back = Sample.from_json(json.loads(json.dumps(lean(encode(sample)))))
    assert lean(encode(back)) == lean(encode(sample))
    assert (back.time_s, back.host, len(back.gpus)) == (sample.time_s, sample.host, len(sample.gpus))


def test_unknown_is_null_in_the_document_and_absent_in_the_lean_one() -> None:
    sample = Sample(time_s=1.0, gpus=(GpuSample(index=0),))
    assert sample.to_json()["gpus"][0]["power_w"] is None
    assert "power_w" not in lean(encode(sample))["gpus"][0]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ([], "not a Sample"),
        ({"format": "flatout-evidence"}, "not a Sample"),
        ({"format": "flatout-sample", "version": 99, "time_s": 1.0}, "version 99"),
        ({"format": "flatout-sample", "version": "1", "time_s": 1.0}, "version 1"),
        ({"time_s": "noon"}, "Sample.time_s"),
        ({}, "Sample.time_s is missing"),
    ],
)
def test_what_is_no_sample_is_refused_in_one_sentence(data: object, word: str) -> None:
    with pytest.raises(BadInput, match=word):
        Sample.from_json(data)


def test_the_gpu_of_a_job_is_the_one_it_names_or_the_only_one_it_can_be() -> None:
    two = (GpuSample(index=0), GpuSample(index=1), GpuSample(index=1, mig_index=0))
    named = Sample(time_s=0.0, gpus=two, job=JobSample(pid=1, gpu_index=1))
    assert named.job_gpu is two[1]
    assert Sample(time_s=0.0, gpus=two, job=JobSample(pid=1)).job_gpu is None
    assert Sample(time_s=0.0, gpus=two[:2], job=JobSample(pid=1, visible_gpus=(0,))).job_gpu is two[0]
    assert Sample(time_s=0.0, gpus=two[:1]).job_gpu is two[0]


# Many samples as one


def gpu(power_w: float | None, used: int, *, index: int = 0) -> GpuSample:
    return GpuSample(index=index, name="H200", power_w=power_w, memory_used_bytes=used, energy_j=float(used))


def test_floats_are_means_over_time_and_memory_is_its_peak() -> None:
    merged = merge(
        [
            Sample(time_s=1.0, span_s=1.0, gpus=(gpu(100.0, 5),), host=HostSample(cpu_share=0.2)),
            Sample(time_s=4.0, span_s=3.0, gpus=(gpu(200.0, 3),), host=HostSample(cpu_share=0.6)),
        ]
    )
    assert (merged.time_s, merged.span_s) == (4.0, 4.0)
    assert merged.gpus[0].power_w == pytest.approx(175.0)
    assert merged.gpus[0].memory_used_bytes == 5
    assert merged.gpus[0].energy_j == 3.0  # a counter: the last
    assert merged.host.cpu_share == pytest.approx(0.5)


def test_a_mean_is_over_those_that_knew() -> None:
    rows = [
        Sample(time_s=float(n), span_s=1.0, gpus=(gpu(power, 1),)) for n, power in enumerate((None, 80.0))
    ]
    assert merge(rows).gpus[0].power_w == 80.0
    assert merge(rows[:1] * 2).gpus[0].power_w is None


def test_rows_are_joined_by_their_key() -> None:
    first = Sample(time_s=1.0, span_s=1.0, gpus=(gpu(1.0, 1), gpu(5.0, 1, index=1)))
    second = Sample(time_s=2.0, span_s=1.0, gpus=(gpu(3.0, 1),), processes=(ProcessSample(pid=7),))
    merged = merge([first, second])
    assert [(row.index, row.power_w) for row in merged.gpus] == [(0, 2.0), (1, 5.0)]
    assert merged.processes == (ProcessSample(pid=7),)


def test_a_job_keeps_its_last_step_and_the_mean_of_its_phases() -> None:
    merged = merge(
        [
            Sample(time_s=1.0, span_s=1.0, job=JobSample(pid=1, steps=5, phases={"wait": 0.2, "rest": 0.8})),
            Sample(time_s=2.0, span_s=1.0, job=JobSample(pid=1, steps=9, phases=None)),
            Sample(time_s=3.0, span_s=1.0, job=JobSample(pid=1, steps=12, phases={"wait": 0.4, "rest": 0.6})),
        ]
    )
    assert merged.job is not None
    assert merged.job.steps == 12
    assert merged.job.phases == pytest.approx({"wait": 0.3, "rest": 0.7})


def test_notes_are_kept_once_each_and_not_without_end() -> None:
    rows = [Sample(time_s=float(n), notes=(f"note {n // 2}",)) for n in range(60)]
    merged = merge(rows)
    assert len(merged.notes) == MOST_NOTES
    assert merged.notes[-1] == "note 29"


@given(shares=st.lists(st.none() | st.floats(0, 1), min_size=2, max_size=20), cut=st.integers(1, 19))
def test_merging_in_two_goes_is_merging_in_one(shares: list[float | None], cut: int) -> None:
    rows = [
        Sample(time_s=float(n + 1), span_s=1.0, host=HostSample(cpu_share=share, memory_used_bytes=n))
        for n, share in enumerate(shares)
    ]
    cut = min(cut, len(rows) - 1)
    whole, parts = merge(rows), merge([merge(rows[:cut]), merge(rows[cut:])])
    assert (whole.time_s, whole.span_s) == (parts.time_s, parts.span_s)
    assert whole.host.memory_used_bytes == parts.host.memory_used_bytes == len(rows) - 1
    if None not in shares:
        assert whole.host.cpu_share == pytest.approx(parts.host.cpu_share)


def test_a_window_keeps_the_samples_of_its_last_seconds() -> None:
    samples = [Sample(time_s=float(time_s)) for time_s in range(10)]
    window = deque(samples)
    drop_older(window, 3.0)
    assert tuple(window) == last_seconds(samples, 3.0) == tuple(samples[6:])
    empty: deque[Sample] = deque()
    drop_older(empty, 3.0)
    assert not empty and last_seconds([], 3.0) == ()
