"""The seed's own cases as they were recorded on an H200, judged again where there is no GPU.

The logs are those of real jobs under `flatout watch --run`; benchmarks/monitor/record.py made them from the
scripts in benchmarks/monitor/cases.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.monitor.past.history import parse_lines
from flatout.monitor.sample import Sample
from flatout.monitor.verdicts.verdict import ENOUGH_SAMPLES, verdict, verdicts

DATA = Path(__file__).resolve().parents[1] / "data"
EXPECTED = {"starved": "data", "healthy": "healthy", "small_kernels": "host", "leaking": "memory"}


def recorded(case: str) -> list[Sample]:
    path = DATA / f"watch_h200_{case}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not recorded yet: benchmarks/monitor/record.py does it on an H200")
    return list(parse_lines(path.read_bytes()))


def of_running_job(case: str) -> list[Sample]:
    return [sample for sample in recorded(case) if sample.job is not None and sample.job.state == "running"]


@pytest.mark.parametrize("case", EXPECTED)
def test_a_recorded_run_has_its_verdict(case: str) -> None:
    found = verdict(of_running_job(case))
    assert found.bound == EXPECTED[case]
    assert found.evidence


@pytest.mark.parametrize("case", ["starved", "healthy", "small_kernels"])
def test_no_other_verdict_was_given_on_the_way(case: str) -> None:
    samples = of_running_job(case)
    given = {verdict(samples[:number]).bound for number in range(1, len(samples) + 1)}
    assert given == {"unknown", EXPECTED[case]}


@pytest.mark.parametrize("case", EXPECTED)
def test_it_was_a_whole_h200(case: str) -> None:
    """What the driver of this GPU tells is known, and the job knows which GPU is its own."""
    samples = [sample for sample in of_running_job(case) if sample.job is not None and sample.job.step_s]
    assert len(samples) >= ENOUGH_SAMPLES
    for sample in samples[1:]:
        gpu, job = sample.job_gpu, sample.job
        assert gpu is not None and job is not None
        assert gpu.name == "NVIDIA H200"
        assert None not in (gpu.utilisation_share, gpu.sm_active_share, gpu.memory_used_bytes, gpu.power_w)
        assert job.gpu_index == gpu.index
        assert None not in (job.phases, job.device_phases, job.allocated_bytes, job.energy_per_step_j)


def test_the_out_of_memory_was_announced_before_it_happened() -> None:
    """The recording ends where the job died of it."""
    samples = of_running_job("leaking")
    announced = next(
        samples[:number]
        for number in range(1, len(samples) + 1)
        if verdict(samples[:number]).bound == "memory"
    )
    predicted = re.search(r"runs out in about ([0-9.]+) s", verdict(announced).sentence)
    assert predicted is not None
    assert float(predicted[1]) == pytest.approx(samples[-1].time_s - announced[-1].time_s, rel=0.2)
    last = samples[-1].job_gpu
    assert last is not None and last.memory_used_bytes is not None and last.memory_total_bytes is not None
    assert last.memory_used_bytes / last.memory_total_bytes > 0.95


def test_an_idle_second_gpu_beside_the_healthy_run() -> None:
    """The machine had one GPU.  Its own idle samples, numbered 1, stand for the second one.

    The first of them looks back at the end of the job before.
    """
    idle = [sample.gpus[0] for sample in recorded("idle") if sample.span_s is not None]
    samples = [
        replace(
            sample,
            gpus=(*sample.gpus, replace(second, index=1)),
            job=sample.job and replace(sample.job, visible_gpus=(0, 1)),
        )
        for sample, second in zip(of_running_job("healthy"), itertools.cycle(idle), strict=False)
    ]
    assert [found.bound for found in verdicts(samples)] == ["idle-gpu", "healthy"]
    assert "GPU 1 of 2" in verdict(samples).sentence
