"""A verdict as a sentence and as a document; the window's GPU only while it answers."""

from __future__ import annotations

from flatout.ground.codec import decode
from flatout.monitor.sample import GpuSample, JobSample, Sample
from flatout.monitor.verdicts.window import Verdict, Window


def test_a_verdict_is_one_sentence_and_one_document() -> None:
    verdict = Verdict(bound="data", sentence="the loader is slow", action="add workers", rules=("FO101",))
    assert str(verdict) == "the loader is slow; add workers"
    assert decode(Verdict, verdict.to_json()) == verdict


def test_a_gpu_that_is_lost_is_no_gpu_of_the_window() -> None:
    def window(lost: bool) -> Window:
        sample = Sample(time_s=1.0, gpus=(GpuSample(index=0, lost=lost),), job=JobSample(pid=1))
        return Window(samples=(sample,), mean=sample)

    assert window(lost=True).gpu is None
    gpu, job = window(lost=False).gpu, window(lost=False).job
    assert (gpu and gpu.index, job and job.pid) == (0, 1)
