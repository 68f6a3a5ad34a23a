"""Memory that runs out, jobs that stand still and clocks held down, each from a window of samples."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.monitor.merging import merge
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.verdicts.alarms import is_held_down, memory_runs_out, stands_still
from flatout.monitor.verdicts.window import Window

GIB = 2**30


def window(samples: list[Sample]) -> Window:
    return Window(samples=tuple(samples), mean=merge(samples))


def seconds(make: Any, *, num: int = 40) -> Window:
    return window([make(second) for second in range(num)])


def test_memory_of_the_device_counts_where_the_allocator_is_unknown() -> None:
    def one(second: int) -> Sample:
        gpu = GpuSample(index=0, memory_used_bytes=(4 + second // 2) * GIB, memory_total_bytes=32 * GIB)
        return Sample(time_s=float(second), gpus=(gpu,))

    # Half of the readings go up: too few for a steady rise.
    assert memory_runs_out(seconds(one)) is None

    def steady(second: int) -> Sample:
        gpu = GpuSample(index=0, memory_used_bytes=4 * GIB + second * GIB // 2, memory_total_bytes=32 * GIB)
        return Sample(time_s=float(second), gpus=(gpu,))

    found = memory_runs_out(seconds(steady))
    assert found is not None
    assert "memory of GPU 0" in found.sentence
    assert "flatout plan" in found.action
    assert found.rules == ()


def test_a_rise_that_ends_long_after_is_not_urgent() -> None:
    def one(second: int) -> Sample:
        host = HostSample(memory_used_bytes=second * GIB // 20, memory_total_bytes=100 * GIB)
        return Sample(time_s=float(second), host=host)

    assert memory_runs_out(seconds(one)) is None
    assert memory_runs_out(seconds(lambda second: Sample(time_s=float(second)))) is None


@pytest.mark.parametrize(("since_s", "is_stalled"), [(5.0, False), (29.0, False), (31.0, True)])
def test_a_stall_is_long_and_much_longer_than_a_step(since_s: float, is_stalled: bool) -> None:
    job = JobSample(pid=1, steps=9, step_s=0.1, since_step_s=since_s)
    found = stands_still(seconds(lambda second: Sample(time_s=float(second), job=job)))
    assert (found is not None) == is_stalled


def test_slow_steps_are_no_stall() -> None:
    job = JobSample(pid=1, steps=9, step_s=60.0, since_step_s=100.0)
    assert stands_still(seconds(lambda second: Sample(time_s=float(second), job=job))) is None


def test_a_stopped_process_is_told_from_a_slow_one() -> None:
    job = JobSample(pid=17, steps=9, state="stopped", since_step_s=1.0)
    found = stands_still(seconds(lambda second: Sample(time_s=float(second), job=job)))
    assert found is not None
    assert "kill -CONT 17" in found.action


@pytest.mark.parametrize(
    ("reasons", "clock_hz", "word"),
    [
        (("thermal limit (software)",), 1900e6, "thermal limit (software)"),
        (("power cap",), 1000e6, "power cap"),
        (("power cap",), 1425e6, None),  # an H200 at work, as recorded
        (("idle",), 300e6, None),
        ((), 1980e6, None),
        (None, 900e6, None),
    ],
)
def test_clocks_are_held_down_when_the_driver_says_so(
    reasons: tuple[str, ...] | None, clock_hz: float, word: str | None
) -> None:
    gpu = GpuSample(
        index=3,
        throttle_reasons=reasons,
        sm_clock_hz=clock_hz,
        sm_clock_max_hz=1980e6,
        power_limit_w=700.0,
        temperature_c=87.0,
    )
    found = is_held_down(seconds(lambda second: Sample(time_s=float(second), gpus=(gpu,))))
    assert (found is None) == (word is None)
    if found is not None and word is not None:
        assert f"GPU 3 is held down by its {word}" in found.sentence
        assert any(word in line for line in found.evidence)
        assert any("87 °C" in line for line in found.evidence)
