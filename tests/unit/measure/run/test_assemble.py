from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import flatout
from flatout.measure.evidence import Loader, Place, StackPath, Stacks, Step
from flatout.measure.run.assemble import Assembly, Ending, _with_lines, _with_waits
from flatout.measure.run.observer import Observer, ObserverOptions
from tests.support import doctor as builders


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    observer = Observer(ObserverOptions(folder=str(tmp_path)))
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
    assert empty.job.torch.partition("+")[0] == torch.__version__.partition("+")[0]
    assert (empty.gpu, empty.job.device, empty.job.device_name) == (None, "cpu", None)
    assert empty.host.cores is not None and empty.host.cores <= (os.cpu_count() or 1)
    unsteady = "every pass after warm-up: the job ended before its steps were steady"
    assert empty.missing[-1] == f"{unsteady}; give it more steps or epochs"

    model = nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while observer.arm != "kernels":
        model(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    partly = assembly.evidence(observer, Ending("interrupted", 130))
    assert {step.arm for step in partly.steps} == {"warmup", "real", "stacks", "count"}
    assert partly.precision is not None and partly.precision.parameter_dtypes == ("float64",)
    total = len(observer.sequence.blocks)
    assert f"the job ended after 3 of {total} planned blocks" in partly.missing
    assert partly.job.started_at == empty.job.started_at


@pytest.mark.parametrize(
    ("ending", "own"),
    [
        (Ending("finished", 0), True),
        (Ending("crashed", 1, "KeyError: 'x'"), True),
        (Ending("crashed", None, "killed"), False),
        (Ending("measured", 0), False),
        (Ending("interrupted", 130), False),
    ],
)
def test_a_job_that_came_to_its_own_end_is_told_from_one_that_was_ended(ending: Ending, own: bool) -> None:
    assert ending.is_its_own == own


@pytest.mark.parametrize(("set_up_s", "told"), [(40.0, True), (20.0, False)])
def test_imports_that_took_most_of_the_time_are_told(observer: Observer, set_up_s: float, told: bool) -> None:
    observer.deadline.first_step_s = observer.deadline.began_s + set_up_s
    missing = Assembly(command=("x",), folder=".").evidence(observer, Ending("measured", 0)).missing
    words = "much of the time: imports and set-up took 40.0 s until the first step, of --seconds 60"
    assert (words in missing) == told


def test_each_thing_that_is_missing_is_said_once(observer: Observer) -> None:
    observer.tools.missing += ["kernels: failed", "kernels: failed"]
    observer.loaders.mutated = True
    missing = Assembly(command=("x",), folder=".").evidence(observer, Ending("finished", 0)).missing
    assert missing.count("kernels: failed") == 1
    assert sum(message.startswith("cached batches:") for message in missing) == 1


@pytest.mark.parametrize(("num_workers", "lines"), [(None, 1), (0, 1), (2, 0)])
def test_lines_that_make_batches_are_read_off_the_training_thread_where_no_worker_does(
    num_workers: int | None, lines: int
) -> None:
    place = Place(file="train.py", line=6, function="batches")
    made = StackPath(
        phase="wait", places=(Place(file="train.py", line=13, function="main"), place), samples=9
    )
    trained = StackPath(phase="forward", places=made.places[:1], samples=4)
    stacks = Stacks(num_steps=3, samples_by_phase={}, paths=(made, trained))
    loader = Loader(
        place=None, dataset="generator", num_workers=num_workers, batch_size=None, pin_memory=False,
        persistent_workers=False, prefetch_factor=None, num_batches=None, trains=True,
    )  # fmt: skip
    (found,) = _with_lines((loader,), stacks)
    assert [line.place for line in found.lines] == [place] * lines


def test_a_gain_on_one_batch_is_one_over_steps_that_wait_for_batches() -> None:
    wait = {"wait": 0.05, "forward": 0.05}
    steps = tuple(Step(index=i, arm="real", block=0, step_s=0.1, phases_s=wait) for i in range(4))
    found = replace(builders.counterfactuals()[0], speedup=2.0, speedup_low=1.0, speedup_high=5.0)
    made = _with_waits(found, steps)
    assert (made.step_s, made.baseline_step_s) == pytest.approx((0.075, 0.1))
    assert (made.speedup, made.speedup_low, made.speedup_high) == pytest.approx(
        (0.1 / 0.075, 1.0, 0.1 / 0.06)
    )
    assert _with_waits(found, ()) == found
