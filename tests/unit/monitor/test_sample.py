"""A Sample is one JSON document that says what it does not know."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.codec import encode
from flatout.errors import BadInput
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample, lean

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
