"""The job's side: totals that add up, values that may be anything, and a GPU whose errors stay its own."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.measure import clock as clock_module
from flatout.measure.clock import FORWARD
from flatout.monitor.job import reporter as reporter_module
from flatout.monitor.job.channel import JobRecord, read_channel
from flatout.monitor.job.reporter import WRITE_EVERY_S, Reporter
from flatout.monitor.job.torch_device import CudaSide


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass when a test says so."""
    seconds = [100.0]
    for module in (clock_module, reporter_module):
        monkeypatch.setattr(module, "now", lambda: seconds[0])
    return seconds


def make(tmp_path: Path) -> Reporter:
    return Reporter(tmp_path / "job.channel")


def written(reporter: Reporter) -> JobRecord:
    reporter.write()
    found = read_channel(reporter._writer.path)
    assert found is not None
    return found


def test_waits_and_the_rest_add_up_to_the_time_of_the_loop(tmp_path: Path, now: list[float]) -> None:
    reporter = make(tmp_path)
    now[0] += 5.0  # before the loop: no part of a step
    reporter.begin()
    for _ in range(4):
        reporter.before_wait()
        now[0] += 0.3
        reporter.after_wait(SimpleNamespace(shape=(8, 2)))
        now[0] += 0.2
        reporter.enter(FORWARD)
        now[0] += 0.5
        reporter.leave()
        reporter.step()
    reporter.pause()
    now[0] += 60.0  # an evaluation
    found = written(reporter)
    assert found.steps == 4
    assert found.samples == 32
    assert found.sees_data
    assert found.host_s["wait"] == pytest.approx(1.2)
    assert found.host_s["forward"] == pytest.approx(2.0)
    assert found.host_s["rest"] == pytest.approx(0.8)
    assert sum(found.host_s.values()) == pytest.approx(4.0)


def test_a_loop_that_never_waits_for_data_does_not_claim_to(tmp_path: Path, now: list[float]) -> None:
    reporter = make(tmp_path)
    reporter.step()
    now[0] += 1.0
    reporter.step(samples=3)
    found = written(reporter)
    assert (found.sees_data, found.samples, found.steps) == (False, 3, 2)
    assert found.device_s is None


def test_steps_are_written_a_hundred_times_a_second_at_most(tmp_path: Path, now: list[float]) -> None:
    reporter = make(tmp_path)
    for _ in range(1000):
        now[0] += WRITE_EVERY_S / 100
        reporter.step()
    found = read_channel(reporter._writer.path)
    assert found is not None
    assert found.number <= 11
    reporter.close()
    last = read_channel(reporter._writer.path)
    assert last is not None
    assert (last.steps, last.ended) == (1000, True)


class Raising:
    def __float__(self) -> float:
        raise RuntimeError("a tensor with two elements")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        ("0.25", 0.25),
        ("high", None),
        ([1.0], None),
        (Raising(), None),
        (SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda")), None),
        (SimpleNamespace(device=SimpleNamespace(type="mps")), None),
    ],
)
def test_a_loss_is_a_number_or_unknown_and_never_an_error(
    tmp_path: Path, value: Any, expected: float | None
) -> None:
    reporter = make(tmp_path)
    reporter.step(loss=value, learning_rate=value)
    found = written(reporter)
    assert (found.loss, found.learning_rate) == (expected, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_is_reported_as_it_is(tmp_path: Path, value: float) -> None:
    reporter = make(tmp_path)
    reporter.step(loss=1.0)
    reporter.step(loss=value)
    found = written(reporter).loss
    assert found == value or (found is not None and math.isnan(found) and math.isnan(value))


def test_a_tensor_of_the_host_is_read_without_a_warning(tmp_path: Path) -> None:
    import torch

    reporter = make(tmp_path)
    reporter.step(loss=torch.tensor(0.5, requires_grad=True) * 2)
    assert written(reporter).loss == 1.0


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (SimpleNamespace(shape=(4, 2)), 4),
        ((SimpleNamespace(shape=(5,)), "labels"), 5),
        ({"input_ids": SimpleNamespace(shape=(6, 9))}, 6),
        ([{"x": SimpleNamespace(shape=(7, 9))}], 7),
        (SimpleNamespace(shape=()), None),
        ("text", None),
        ([], None),
        (None, None),
    ],
)
def test_the_rows_of_a_batch(tmp_path: Path, batch: Any, rows: int | None) -> None:
    reporter = make(tmp_path)
    reporter.before_wait()
    reporter.after_wait(batch)
    assert written(reporter).samples == rows


def test_an_error_of_the_gpu_is_not_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda = SimpleNamespace(current_device=broken, get_device_properties=broken)
    monkeypatch.setattr(reporter_module, "device_of_job", lambda: CudaSide(SimpleNamespace(cuda=cuda)))
    reporter = make(tmp_path)
    for _ in range(3):
        reporter.before_wait()
        reporter.after_wait()
        reporter.step()
        assert written(reporter).device_s is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    reporter = make(tmp_path)
    reporter.step()
    before = written(reporter)
    child = os.fork()
    if child == 0:
        reporter.step()
        reporter.write()
        reporter.close()
        os._exit(0)
    os.waitpid(child, 0)
    after = read_channel(reporter._writer.path)
    assert after == before
