from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import flatout
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import Observer, ObserverOptions


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    observer = Observer(ObserverOptions(folder=str(tmp_path)), on_finished=lambda: None)
    observer.install()
    yield observer
    observer.remove()


def test_evidence_can_be_asked_for_at_any_moment(observer: Observer, tmp_path: Path) -> None:
    assembly = Assembly(command=("train.py", "--lr"), folder="/home/ada/secret-place/job")
    empty = assembly.evidence(observer, Ending("crashed", 1, "KeyError: 'x'"))
    assert empty.steps == ()
    assert (empty.job.ended, empty.job.exit_code, empty.job.error) == ("crashed", 1, "KeyError: 'x'")
    assert empty.job.folder == "job"  # where it lies is nobody's business
    assert empty.job.flatout == flatout.__version__
    assert empty.job.torch == torch.__version__
    assert (empty.gpu, empty.job.device, empty.job.device_name) == (None, "cpu", None)
    assert empty.host.cores is not None and empty.host.cores <= (os.cpu_count() or 1)
    assert empty.missing[-1] == "every pass after warm-up: the job ended before it was steady"

    model = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while observer.arm != "kernels":
        model(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    partly = assembly.evidence(observer, Ending("interrupted", 130))
    assert {step.arm for step in partly.steps} == {"warmup", "real", "stacks", "count"}
    assert partly.precision is not None and partly.precision.parameter_dtypes == ("float64",)
    total = len(observer.blocks)
    assert f"the job ended after 3 of {total} planned blocks" in partly.missing
    assert partly.job.started_at == empty.job.started_at


def test_each_thing_that_is_missing_is_said_once(observer: Observer) -> None:
    observer.tools.missing += ["kernels: failed", "kernels: failed"]
    observer.loaders.mutated = True
    missing = Assembly(command=("x",), folder=".").evidence(observer, Ending("finished", 0)).missing
    assert missing.count("kernels: failed") == 1
    assert sum(message.startswith("cached batches:") for message in missing) == 1
