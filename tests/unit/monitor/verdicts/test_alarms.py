"""Memory that runs out, jobs that stand still and clocks held down, each from a window of samples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample, merge
from flatout.monitor.verdicts.alarms import fit_rise, is_held_down, memory_runs_out, stands_still
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
        assert f"GPU 3 is slowed by its {word}" in found.sentence
        assert any(word in line for line in found.evidence)
        assert any("87 °C" in line for line in found.evidence)


# A rise that will end in an out-of-memory, told from what only looks like one


def test_a_steady_rise_has_its_slope() -> None:
    rise = fit_rise([(float(t), 100.0 + 3.0 * t) for t in range(40)], least=10)
    assert rise is not None
    assert (rise.bytes_per_s, rise.span_s) == (3.0, 39.0)


@given(
    slope=st.floats(1, 1e9),
    noise=st.lists(st.floats(-0.4, 0.4), min_size=40, max_size=40),
)
def test_noise_below_the_step_does_not_hide_a_rise(slope: float, noise: list[float]) -> None:
    rise = fit_rise([(float(t), slope * (t + extra)) for t, extra in enumerate(noise)], least=slope)
    assert rise is not None
    assert rise.bytes_per_s == pytest.approx(slope, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 40,  # level
        [float(40 - t) for t in range(40)],  # falling
        [0.0] * 20 + [100.0] * 20,  # one jump
        [float(t % 2) * 50 for t in range(40)],  # up and down
        [min(t, 10) * 10.0 for t in range(40)],  # a warm-up that ended
        [None] * 40,
    ],
)
def test_what_is_no_rise(values: list[float | None]) -> None:
    assert fit_rise([(float(t), value) for t, value in enumerate(values)], least=1) is None


def test_a_few_seconds_or_a_few_bytes_are_no_trend() -> None:
    assert fit_rise([(t / 10, 100.0 * t) for t in range(40)], least=1) is None
    assert fit_rise([(float(t), float(t)) for t in range(40)], least=1000) is None
    assert fit_rise([(10.0 * t, float(t)) for t in range(7)], least=1) is None
