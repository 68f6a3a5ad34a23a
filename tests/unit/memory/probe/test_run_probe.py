from __future__ import annotations

import functools

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.jobs.step import make_parts
from flatout.memory.probe import run_probe as probe_module
from flatout.memory.probe.run_probe import choose_batches, probe, step_past_overflow
from flatout.memory.process.isolated_process import run_isolated

GIB = 2**30
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def job() -> Job:
    return Job(
        name="line",
        make_model=functools.partial(torch.nn.Linear, 8, 8),
        make_batch=lambda batch_size: torch.randn(batch_size, 8),
        loss=lambda model, batch: model(batch).square().mean(),
    )


@needs_no_gpu
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"^--profile needs a CUDA GPU; ") as caught:
        probe(job(), Recipe())
    assert "\n" not in str(caught.value)


@needs_no_gpu
def test_the_child_refuses_as_well() -> None:
    with pytest.raises(BadInput, match="--profile needs a CUDA GPU"):
        run_isolated(probe_module.look_at, 0, what="a test")
    with pytest.raises(BadInput, match="--profile needs a CUDA GPU"):
        run_isolated(probe_module.measure, job(), Recipe(), {"batch_size": 8}, (1, 2), 0, what="a test")


# Which batches


@pytest.mark.parametrize(("batch_size", "expected"), [(64, (8, 16)), (8, (1, 2)), (7, (1,)), (1, (1,))])
def test_with_room_a_quarter_of_the_batch_is_probed(batch_size: int, expected: tuple[int, ...]) -> None:
    assert choose_batches(lambda _: GIB, batch_size=batch_size, free_bytes=80 * GIB) == expected


@pytest.mark.parametrize("free_gib", [9, 16, 40, 400])
def test_no_probe_is_expected_above_a_quarter_of_what_is_free(free_gib: int) -> None:
    def process_bytes(batch_size: int) -> int:
        return 2 * GIB + batch_size * GIB // 4

    chosen = choose_batches(process_bytes, batch_size=256, free_bytes=free_gib * GIB)
    assert all(process_bytes(batch_size) <= free_gib * GIB / 4 for batch_size in chosen)
    assert 1 <= chosen[-1] <= 64 and sorted(set(chosen)) == list(chosen)


def test_a_job_too_large_to_probe_is_refused() -> None:
    with pytest.raises(BadInput, match="more than a quarter"):
        choose_batches(lambda _: 30 * GIB, batch_size=4, free_bytes=80 * GIB)


@pytest.mark.parametrize("batch_sizes", [(), (0, 1), (2, 2), (1, 2, 3)])
def test_batches_that_make_no_line_are_refused(batch_sizes: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="one or two different positive numbers"):
        probe(job(), Recipe(), batch_sizes=batch_sizes)


# How many steps


class Scaler:
    """A scale that overflows until it is small, as `torch.amp.GradScaler` has one on a GPU."""

    def __init__(self, *, fits_at: float) -> None:
        self.current, self.fits_at = 65536.0, fits_at

    def get_scale(self) -> float:
        return self.current

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.current <= self.fits_at:
            optimizer.step()

    def update(self) -> None:
        if self.current > self.fits_at:
            self.current /= 2


@pytest.mark.parametrize(("fits_at", "num_steps"), [(65536.0, 1), (16384.0, 3)])
def test_a_probe_waits_for_the_optimizers_first_step(fits_at: float, num_steps: int) -> None:
    parts = make_parts(job(), Recipe(), device="cpu")
    assert step_past_overflow(parts, job(), Recipe(), torch.randn(2, 8), device="cpu") == 0
    parts.scaler = Scaler(fits_at=fits_at)
    assert parts.optimizer is not None and not parts.optimizer.state
    assert step_past_overflow(parts, job(), Recipe(), torch.randn(2, 8), device="cpu") == num_steps
    assert parts.optimizer.state


def test_a_job_that_only_overflows_is_refused() -> None:
    parts = make_parts(job(), Recipe(), device="cpu")
    parts.scaler = Scaler(fits_at=0.0)
    with pytest.raises(BadInput, match="overflows in fp16"):
        step_past_overflow(parts, job(), Recipe(), torch.randn(2, 8), device="cpu")
