"""The figures of a run against what it was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout.ground.runs import CHANNEL_FILE
from flatout.monitor.job.reporter import Reporter
from flatout.monitor.past.outline import read_outline
from flatout.monitor.past.summary import Summary, energy_of_job, mean_step_s, summarise, total
from flatout.monitor.sample import Sample
from tests.support.monitor import GIB, ROWS_PER_STEP, START_S, kept_run, story


def summary_of(tmp_path: Path, samples: tuple[Sample, ...]) -> Summary:
    return summarise(read_outline(kept_run(tmp_path, samples)))


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    samples = story(seconds=300, wait=0.1)
    found = summary_of(tmp_path, samples)
    assert found.step_s == pytest.approx(0.081, rel=0.01)
    assert found.steps_per_s == pytest.approx(1 / 0.081, rel=0.02)
    assert found.samples_per_s == pytest.approx(ROWS_PER_STEP / 0.081, rel=0.02)
    assert found.phases is not None and found.phases["wait"] == pytest.approx(0.1, abs=0.01)
    assert (found.gpu_name, found.peak_allocated_bytes) == ("NVIDIA H200", 55 * GIB)
    watts = [gpu.power_w for sample in samples[:-1] if (gpu := sample.gpu(0)) and gpu.power_w]
    # The counter is first known at the end of the first point, two seconds into the run.
    assert found.energy_j == pytest.approx(sum(watts), rel=0.01)
    job = samples[-1].job
    assert job is not None and job.steps is not None and found.energy_j is not None
    assert found.energy_per_step_j == pytest.approx(found.energy_j / (job.steps - 12), rel=0.02)
    assert found.energy_per_sample_j == pytest.approx(found.energy_per_step_j / ROWS_PER_STEP, rel=1e-3)


def test_steps_after_the_last_sample_count(tmp_path: Path) -> None:
    folder = kept_run(tmp_path, story(seconds=20))
    sampled = summarise(read_outline(folder))
    reporter = Reporter(folder / CHANNEL_FILE)
    assert sampled.steps is not None
    for _ in range(sampled.steps + 7):
        reporter.step(loss=0.25, samples=ROWS_PER_STEP)
    reporter.close()
    found = summarise(read_outline(folder))
    assert (found.steps, found.last_loss) == (sampled.steps + 7, 0.25)
    assert found.samples == ROWS_PER_STEP * (sampled.steps + 7)
    assert found.step_s == sampled.step_s


def test_long_steps_weigh_by_their_number_not_their_time() -> None:
    """Nine steps of 0.1 s in one point and one of 0.9 s in the next: 0.18 s a step."""
    one = story(seconds=1)[0]
    assert one.job is not None

    def point(second: int, steps: int, step_s: float | None) -> Sample:
        assert one.job is not None
        return replace(one, time_s=START_S + second, job=replace(one.job, steps=steps, step_s=step_s))

    points = [point(0, 0, None), point(1, 9, 0.1), point(2, 10, 0.9)]
    assert mean_step_s(points) == pytest.approx(0.18)
    assert mean_step_s(points[:1]) is None


def test_bounds_are_shares_of_the_time_and_speak_with_a_typical_sentence(tmp_path: Path) -> None:
    found = summary_of(tmp_path, story(seconds=600, wait=0.03, late_wait=0.45))
    assert [each.bound for each in found.bounds] == ["healthy", "data"]
    assert sum(each.share for each in found.bounds) == pytest.approx(1.0)
    assert found.bounds[1].share == pytest.approx(1 / 3, abs=0.02)
    assert "the loader is too slow: 4" in found.bounds[1].sentence
    assert found.bounds[1].rules


def test_unknown_is_none(tmp_path: Path) -> None:
    bare = tuple(Sample(time_s=START_S + second, span_s=1.0) for second in range(10))
    found = summary_of(tmp_path, bare)
    assert found.step_s is found.energy_j is found.power_w is found.phases is found.gpu_name is None
    assert found.bounds == ()
    document = found.to_json()
    assert (document["format"], document["step_s"]) == ("flatout-run-summary", None)


def test_counters_that_were_begun_again_do_not_count_backwards() -> None:
    one = story(seconds=1)[0]
    gpu = one.gpus[0]
    points = [replace(one, gpus=(replace(gpu, energy_j=value),)) for value in (100.0, 150.0, 10.0, 30.0)]
    assert energy_of_job(points) == 70.0
    assert energy_of_job(points[:1]) is None
    assert one.job is not None
    fallen = [replace(one, job=replace(one.job, steps=n)) for n in (50, 10)]
    assert total(fallen, lambda job: job.steps) is None


def test_of_a_machine_without_a_job_the_first_gpu_is_summarised(tmp_path: Path) -> None:
    found = summary_of(tmp_path, tuple(replace(sample, job=None) for sample in story(seconds=20)))
    assert found.gpu_name == "NVIDIA H200" and found.power_w is not None and found.steps is None
