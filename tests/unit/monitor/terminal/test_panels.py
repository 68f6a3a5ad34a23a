"""The parts of the view: columns that fit, figures that are unknown, names that are hostile."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample
from flatout.monitor.terminal.panels import (
    MARKS,
    PLAIN_MARKS,
    Paper,
    curves,
    gpu_table,
    host_line,
    job_lines,
    phase_bar,
    process_table,
    sparkline,
    text,
)
from flatout.monitor.terminal.view import View
from tests.support.monitor import HOSTILE, story

SAMPLES = story(seconds=60)
LATEST = SAMPLES[-1]


def drawn(part: RenderableType, *, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(part)
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_no_table_is_wider_than_the_terminal(width: int) -> None:
    paper = Paper(width=width)
    parts = [
        gpu_table(LATEST, View(), paper),
        process_table(LATEST, View(), paper, rows=9),
        curves(SAMPLES, View(), paper),
    ]
    lines = [line for part in parts for line in drawn(part, width=width).splitlines()]
    assert len(lines) > 12
    assert max(len(line) for line in lines) <= width


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    narrow, wide = (drawn(gpu_table(LATEST, View(), Paper(width=width)), width=width) for width in (60, 140))
    for word in ("util", "SM", "memory", "power"):
        assert word in narrow
    assert "clock" not in narrow
    assert "NVIDIA H200" in wide and "clock" in wide and "from host" in wide


def test_unknown_is_never_zero() -> None:
    sample = Sample(
        time_s=0,
        gpus=(GpuSample(index=0),),
        processes=(ProcessSample(pid=1, gpu_index=0), ProcessSample(pid=2)),
    )
    shown = drawn(gpu_table(sample, View(), Paper(width=140)), width=140)
    assert shown.count("n/a") == 9 and " 0 %" not in shown
    listed = drawn(process_table(sample, View(), Paper(width=100), rows=3))
    assert listed.count("n/a") == 5 + 3  # one that is on no GPU has no share of it
    assert drawn(host_line(HostSample())).count("n/a") == 6


def test_without_a_gpu_there_is_one_clear_sentence() -> None:
    reason = "no NVIDIA driver: the NVML library is not on this machine"
    sample = Sample(time_s=0, missing={"gpus": reason})
    assert drawn(gpu_table(sample, View(), Paper(width=100))) == f"no GPU: {reason}\n"


def test_a_lost_gpu_says_so_and_shows_no_figures() -> None:
    lost = replace(LATEST.gpus[0], lost=True)
    shown = drawn(gpu_table(replace(LATEST, gpus=(lost,)), View(), Paper(width=100)))
    assert "lost" in shown and "%" not in shown


def test_the_gpu_that_is_looked_at_is_marked_and_has_the_curves() -> None:
    view = View(gpu=1)
    assert "> 1" in drawn(gpu_table(LATEST, view, Paper(width=80)))
    assert "GPU 1 SM" in drawn(curves(SAMPLES, view, Paper(width=80)))
    alone = replace(LATEST, gpus=LATEST.gpus[:1])
    assert ">" not in drawn(gpu_table(alone, view, Paper(width=80)))


def test_a_reason_to_be_held_down_stands_beside_the_gpu() -> None:
    held = replace(LATEST.gpus[0], throttle_reasons=("power cap", "thermal limit (hardware)"))
    shown = drawn(gpu_table(replace(LATEST, gpus=(held,)), View(), Paper(width=100)))
    assert "power cap, thermal limit" in shown and "64 °C" in shown
    assert len(shown.splitlines()) == 2


def test_instances_have_two_numbers() -> None:
    assert GpuSample(index=2, mig_index=1).label == "2.1"


def test_only_phases_that_were_told_apart_are_shown() -> None:
    job = JobSample(pid=1, steps=3, phases={"wait": 0.4, "rest": 0.6})
    shown = "".join(drawn(line) for line in job_lines(job))
    assert "wait" in shown and "40 %" in shown and "forward" not in shown


def test_what_torch_holds_is_shown_without_any_driver() -> None:
    job = JobSample(pid=1, steps=3, allocated_bytes=2**30, reserved_bytes=2**31)
    assert "torch holds 1.00 GiB of 2.00 GiB" in drawn(job_lines(job)[0])


def test_a_bar_has_its_length_and_letters_where_there_are_no_colours() -> None:
    shares = {"wait": 0.25, "forward": 0.5, "rest": 0.25}
    plain = phase_bar(shares, 8, Paper(width=80, has_colour=False)).plain
    assert plain == "wwffffrr"
    assert phase_bar(shares, 8, Paper(width=80)).plain == "█" * 8


def test_many_processes_are_counted_not_drawn() -> None:
    many = replace(LATEST, processes=tuple(ProcessSample(pid=i, name="p") for i in range(30)))
    shown = drawn(process_table(many, View(), Paper(width=80), rows=4))
    assert len(shown.splitlines()) == 6
    assert "and 26 more" in shown


def test_without_a_gpu_the_largest_of_the_host_is_first_and_no_column_is_empty() -> None:
    processes = (ProcessSample(pid=1, cpu_cores=0.1, name="a"), ProcessSample(pid=2, cpu_cores=1.5, name="b"))
    sample = Sample(time_s=0, processes=processes)
    lines = drawn(process_table(sample, View(), Paper(width=60), rows=3)).splitlines()
    assert lines[0].split() == ["pid", "CPU*", "name"]
    assert [line.split() for line in lines[1:]] == [["2", "1.50", "b"], ["1", "0.10", "a"]]


def test_hostile_names_are_text() -> None:
    named = replace(LATEST.processes[0], name=HOSTILE)
    gpu = replace(LATEST.gpus[0], name=HOSTILE)
    sample = replace(LATEST, processes=(named,), gpus=(gpu,))
    shown = drawn(process_table(sample, View(), Paper(width=140), rows=3), width=140)
    shown += drawn(gpu_table(sample, View(), Paper(width=140)), width=140)
    assert "[bold red]" in shown  # markup is shown, not obeyed
    assert not any(char in shown for char in "\x1b\x07\u202e")
    assert len(text("x" * 999).plain) <= 60


# A curve in one row: time decides the column, unknown is a blank, zero is a mark


def points(*values: float | None, start_s: float = 1000.0) -> list[tuple[float, float | None]]:
    return [(start_s + second, value) for second, value in enumerate(values)]


def test_values_become_marks_and_unknown_a_blank() -> None:
    assert sparkline(points(0.0, None, 0.5, 1.0), width=4, span_s=4, top=1.0) == "▁ ▅█"


def test_a_gap_in_time_is_a_gap_in_the_curve() -> None:
    drawn = sparkline([(1000.0, 1.0), (1003.0, 1.0)], width=4, span_s=4, top=1.0)
    assert drawn == "█  █"


def test_the_highest_value_fills_a_curve_without_a_top() -> None:
    assert sparkline(points(1.0, 2.0, 4.0), width=3, span_s=3) == "▃▅█"
    assert sparkline(points(0.0, 0.0), width=2, span_s=2) == "▁▁"


def test_what_lies_before_the_span_is_not_drawn_and_short_curves_begin_late() -> None:
    assert sparkline(points(1.0, 1.0, 0.0), width=2, span_s=2, top=1.0) == "█▁"
    assert sparkline(points(1.0), width=3, span_s=3, top=1.0) == "  █"
    assert sparkline([], width=3, span_s=3) == "   "


def test_a_curve_moves_as_a_whole() -> None:
    """A second later every column but the new one is the one beside it."""
    values = [0.1, 0.9, 0.4, 0.7, 0.2, 0.8]
    before = sparkline(points(*values[:5]), width=5, span_s=5, top=1.0)
    after = sparkline(points(*values), width=5, span_s=5, top=1.0)
    assert after[:4] == before[1:]


def test_values_that_are_no_numbers_are_unknown() -> None:
    assert sparkline(points(float("nan"), float("inf"), 1.0), width=3, span_s=3, top=1.0) == "  █"


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=50),
    st.integers(0, 80),
    st.sampled_from([MARKS, PLAIN_MARKS]),
)
def test_it_always_has_its_width(values: list[float | None], width: int, marks: str) -> None:
    drawn = sparkline(points(*values), width=width, span_s=60, marks=marks)
    assert len(drawn) == width
    assert set(drawn) <= {" ", *marks}


def test_a_phase_that_was_not_measured_is_not_zero() -> None:
    job = JobSample(
        pid=1, phases={"wait": 0.0, "forward": 0.4, "rest": 0.6}, device_phases={"wait": 0.2, "rest": 0.8}
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(*job_lines(job))
    host, device = console.file.getvalue().splitlines()[-2:]  # type: ignore[attr-defined]
    assert host.split() == ["host", "0", "%", "40", "%", "60", "%"]
    assert device.split() == ["GPU", "20", "%", "n/a", "80", "%"]
