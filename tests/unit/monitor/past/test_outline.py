"""A whole run in some hundred points: nothing lost but the grain, and bounded however long it was."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.runs import Run, create_run
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.past.outline import NUM_STRETCHES, POINTS_PER_STRETCH, read_outline
from flatout.monitor.past.report import headline
from flatout.monitor.past.summary import summarise
from flatout.monitor.sample import ProcessSample, Sample
from tests.support.monitor import START_S, kept_run, story


def test_verdicts_follow_the_run(tmp_path: Path) -> None:
    recorded = read_outline(kept_run(tmp_path, story(seconds=300, wait=0.03, late_wait=0.45)))
    bounds = [stretch.verdict.bound if stretch.verdict else None for stretch in recorded.stretches]
    assert set(bounds[:19]) == {"healthy"}
    assert set(bounds[20:]) == {"data"}
    assert recorded.duration_s == 299.0
    assert recorded.state == "ended"
    ends = [(stretch.start_s, stretch.end_s) for stretch in recorded.stretches]
    assert ends == sorted(ends)


def test_points_are_bounded_and_cover_the_run(tmp_path: Path) -> None:
    recorded = read_outline(kept_run(tmp_path, story(seconds=900, gpus=False)))
    assert 250 <= len(recorded.points) <= NUM_STRETCHES * POINTS_PER_STRETCH
    assert recorded.points[-1].time_s == START_S + 899
    assert sum(point.span_s or 0.0 for point in recorded.points) == pytest.approx(899, rel=0.01)


def test_a_long_run_is_read_from_its_minutes_and_keeps_its_last_seconds(tmp_path: Path) -> None:
    """Twelve hours, then a death: the log has no last minute, but the last seconds are there."""
    run = Run(name="long", pid=1, process_started_s=1.0, started_s=START_S)
    folder = create_run(run, tmp_path)
    writer = HistoryWriter(folder)
    own = ProcessSample(pid=1, of_job=True, cpu_cores=1.0)
    one = replace(story(seconds=2, gpus=False)[1], processes=(own,))
    assert one.job is not None
    hours, every_s = 12, 30.0
    num = int(hours * 3600 / every_s)
    for number in range(num):
        job = replace(one.job, steps=number * 100)
        writer(replace(one, time_s=START_S + every_s * number, span_s=every_s, job=job))
    # No close: what was not yet a whole minute is in the finest tier alone.
    recorded = read_outline(folder)
    assert recorded.state == "died"
    assert recorded.points[-1].time_s == START_S + every_s * (num - 1)
    assert len(recorded.points) <= NUM_STRETCHES * POINTS_PER_STRETCH + 1
    spans = [point.span_s for point in recorded.points[:-1]]
    assert min(span for span in spans if span is not None) >= 60
    assert all(stretch.verdict is not None for stretch in recorded.stretches)


def test_what_happened_is_kept_with_its_time(tmp_path: Path) -> None:
    samples = list(story(seconds=40))
    samples[20] = replace(samples[20], notes=("GPU 1 is lost",))
    recorded = read_outline(kept_run(tmp_path, tuple(samples)))
    assert recorded.notes == ((START_S + 20, "GPU 1 is lost"),)


def test_a_run_of_one_sample_is_a_run(tmp_path: Path) -> None:
    recorded = read_outline(kept_run(tmp_path, (Sample(time_s=START_S),)))
    assert len(recorded.points) == 1
    assert recorded.duration_s == 0.0
    assert recorded.stretches[0].verdict is None


def test_throttling_in_one_sample_is_not_the_whole_run(tmp_path: Path) -> None:
    """That nothing held the GPU down is known, and a log must not forget it."""
    samples = list(story(seconds=30))
    gpu, other = samples[12].gpus
    samples[12] = replace(samples[12], gpus=(replace(gpu, throttle_reasons=("hardware slowdown",)), other))
    recorded = read_outline(kept_run(tmp_path, tuple(samples)))
    assert {stretch.verdict.bound for stretch in recorded.stretches if stretch.verdict} == {"healthy"}


def test_torn_and_foreign_lines_are_dropped(tmp_path: Path) -> None:
    folder = kept_run(tmp_path, story(seconds=20))
    with (folder / "raw-000001.jsonl").open("a") as file:
        file.write('{"format": "something else"}\n[1]\n{"time_s": 17')
    assert read_outline(folder).points[-1].time_s == START_S + 19


def test_the_start_of_a_job_says_nothing_of_its_steps(tmp_path: Path) -> None:
    """Imports keep a core busy, whatever the steps do after them."""
    samples = [
        replace(sample, job=replace(sample.job, steps=None, phases=None))
        if number < 7 and sample.job
        else sample
        for number, sample in enumerate(story(seconds=11))
    ]
    assert read_outline(kept_run(tmp_path, tuple(samples))).stretches[0].verdict is None


def test_a_file_of_the_log_that_was_cut_is_a_gap(tmp_path: Path) -> None:
    folder = kept_run(tmp_path, story(seconds=20))
    raw = folder / "raw-000001.jsonl"
    packed = gzip.compress(raw.read_bytes())
    raw.unlink()
    for damaged in (packed[: len(packed) // 2], packed[:50] + b"\xff" * 50 + packed[100:], b"no gzip"):
        raw.with_name("raw-000001.jsonl.gz").write_bytes(damaged)
        assert read_outline(folder).end_s == pytest.approx(START_S + 19)  # the minutes have it


def test_no_run_and_no_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run"):
        read_outline(tmp_path)
    empty = create_run(Run(name="e", pid=1, process_started_s=None, started_s=START_S), tmp_path)
    with pytest.raises(BadInput, match="has no samples"):
        read_outline(empty)


def test_a_loss_that_was_lost_at_the_end_does_not_count_for_the_stretch_before_it(tmp_path: Path) -> None:
    samples = list(story(seconds=60))
    for number, each in enumerate(samples):
        assert each.job is not None
        samples[number] = replace(each, job=replace(each.job, loss=float("nan") if number >= 48 else 1.0))
    recorded = read_outline(kept_run(tmp_path, samples))
    bounds = [stretch.verdict.bound for stretch in recorded.stretches if stretch.verdict is not None]
    assert "diverged" not in bounds[:-2]
    assert bounds[-1] == "diverged"
    summary = summarise(recorded)
    assert headline(summary).startswith("The loss is NaN since 0:")
    assert sum(each.share for each in summary.bounds if each.bound == "diverged") < 0.3
