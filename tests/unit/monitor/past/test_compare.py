"""Two runs: what differs is told, what is noise is called noise, what is too short is not judged."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.ground.runs import Run
from flatout.monitor.past.compare import Comparison, Difference, compare
from flatout.monitor.past.outline import RunOutline, read_outline
from flatout.monitor.sample import Sample
from tests.support.monitor import START_S, kept_run, story

RUN = Run(name="train", pid=1, process_started_s=None, started_s=START_S)


def compared(tmp_path: Path, first: tuple[Sample, ...], second: tuple[Sample, ...]) -> Comparison:
    runs = [
        read_outline(kept_run(tmp_path, samples, pid=number))
        for number, samples in enumerate((first, second), start=1)
    ]
    return compare(*runs)


def found(comparison: Comparison, name: str) -> Difference:
    (difference,) = (each for each in comparison.differences if each.name == name)
    return difference


def noisy(seed: int, *, step_s: float = 0.1, seconds: int = 200) -> tuple[Sample, ...]:
    """Steps that vary by a tenth from second to second, and slowly besides."""
    source = random.Random(seed)
    drift = 1.0
    samples = []
    for sample in story(seconds=seconds, step_s=step_s):
        assert sample.job is not None and sample.job.step_s is not None
        drift = 0.9 * drift + 0.1 * source.gauss(1.0, 0.2)
        factor = drift * source.gauss(1.0, 0.1)
        job = replace(sample.job, step_s=step_s * factor, steps_per_s=1 / (step_s * factor))
        samples.append(replace(sample, job=job))
    return tuple(samples)


def test_a_faster_run_is_better_in_what_made_it_so(tmp_path: Path) -> None:
    comparison = compared(tmp_path, story(seconds=200, wait=0.4, step_s=0.13), story(seconds=200, wait=0.05))
    step = found(comparison, "step time")
    assert step.outcome == "better"
    assert step.ratio == pytest.approx(0.081 / 0.13, rel=0.02)
    assert step.ratio_low is not None and step.ratio_high is not None
    assert step.ratio_low <= (step.ratio or 0) <= step.ratio_high < 1
    assert found(comparison, "step: wait").outcome == "better"
    assert found(comparison, "step: forward").outcome == "within noise"
    assert found(comparison, "samples per second").outcome == "better"
    assert found(comparison, "power").outcome == "higher"
    assert found(comparison, "peak memory of tensors").outcome == "within noise"
    assert comparison.caveats == ()


def test_the_same_run_twice_differs_in_nothing(tmp_path: Path) -> None:
    samples = story(seconds=100)
    comparison = compared(tmp_path, samples, samples)
    assert {each.outcome for each in comparison.differences} == {"within noise"}
    assert comparison.that_matter == ()


def test_noise_is_called_noise_and_a_real_difference_is_seen_through_it(tmp_path: Path) -> None:
    def outcome(first: tuple[Sample, ...], second: tuple[Sample, ...]) -> str:
        runs = [
            RunOutline(folder=tmp_path, run=RUN, state="ended", points=points, stretches=(), notes=())
            for points in (first, second)
        ]
        return found(compare(*runs), "step time").outcome

    calls = [outcome(noisy(seed), noisy(seed + 100)) for seed in range(10)]
    # An interval of 95 % is wrong now and then; drift makes it a little more often.
    assert calls.count("within noise") >= 8
    assert outcome(noisy(1), noisy(2, step_s=0.13)) == "worse"


def test_a_small_part_of_the_step_may_double_without_a_word(tmp_path: Path) -> None:
    def with_rest(share: float) -> tuple[Sample, ...]:
        samples = []
        for sample in story(seconds=100):
            assert sample.job is not None
            job = replace(sample.job, phases={"forward": 1 - share, "rest": share})
            samples.append(replace(sample, job=job))
        return tuple(samples)

    difference = found(compared(tmp_path, with_rest(0.002), with_rest(0.004)), "step: rest")
    assert difference.ratio == pytest.approx(2.0, rel=0.02)
    assert difference.outcome == "within noise"


def test_short_runs_are_not_judged(tmp_path: Path) -> None:
    comparison = compared(tmp_path, story(seconds=10), story(seconds=10, step_s=0.2))
    assert found(comparison, "step time").outcome == "too short to tell"
    assert found(comparison, "step time").ratio is not None


def test_what_one_run_does_not_know_is_unknown(tmp_path: Path) -> None:
    comparison = compared(tmp_path, story(seconds=60), story(seconds=60, gpus=False))
    power = found(comparison, "power")
    assert (power.outcome, power.second, power.ratio) == ("unknown", None, None)
    assert comparison.caveats == ("they ran on different GPUs: NVIDIA H200 and none",)


def test_other_differences_are_named(tmp_path: Path) -> None:
    larger = tuple(
        replace(sample, job=replace(sample.job, samples=(sample.job.steps or 0) * 128))
        for sample in story(seconds=60)
        if sample.job is not None
    )
    first = read_outline(kept_run(tmp_path, story(seconds=60), pid=1))
    second = read_outline(kept_run(tmp_path, larger, pid=2**22 + 1, ended=False))
    caveats = compare(first, second).caveats
    assert caveats == (
        "their steps differ in size: 64 and 128 samples; compare per sample, not per step",
        "run 2 died before its end",
    )


def test_it_is_one_document(tmp_path: Path) -> None:
    document = compared(tmp_path, story(seconds=30), story(seconds=30)).to_json()
    assert (document["format"], document["version"]) == ("flatout-comparison", 1)
    assert {"first", "second", "differences", "caveats"} <= document.keys()
