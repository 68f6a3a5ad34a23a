"""Many samples as one: means over time, peaks of memory, and nothing made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.merging import MOST_NOTES, merge
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample


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
