"""Every number of a sample, known or not, once."""

from __future__ import annotations

from flatout.measure import PHASES
from flatout.monitor.sample import GpuSample, JobSample, Sample
from flatout.monitor.sinks.figures import figures


def test_known_and_unknown_figures_have_the_same_columns() -> None:
    gpus = (GpuSample(index=0), GpuSample(index=0, mig_index=2, power_w=5.0))
    empty = [figure.path for figure in figures(Sample(time_s=0.0, gpus=gpus))]
    job = JobSample(pid=1, steps=3, loss=0.5, phases={"wait": 0.25})
    full = {figure.path: figure.value for figure in figures(Sample(time_s=0.0, gpus=gpus, job=job))}
    assert list(full) == empty
    assert len(set(empty)) == len(empty) > 50
    assert (full["job/loss"], full["job/steps"], full["job/phases/wait"]) == (0.5, 3, 0.25)
    assert (full["gpu/0/power_w"], full["gpu/0.2/power_w"]) == (None, 5.0)
    assert sum(path.startswith("job/device_phases/") for path in empty) == len(PHASES)


def test_numbers_of_things_are_no_figures() -> None:
    names = {figure.name for figure in figures(Sample(time_s=0.0, gpus=(GpuSample(index=3),)))}
    assert not names & {"index", "pid", "gpu_index", "rank", "lost", "name"}
