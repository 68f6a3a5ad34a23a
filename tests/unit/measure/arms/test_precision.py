from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.measure.arms.precision import Autocast, Tf32, TrainingState, narrow_dtype
from flatout.measure.clock import Clock


class Job:
    """A model whose forward and backward note the format they run in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.seen: list[tuple[str, Any]] = []
        self.step(1)
        self.seen.clear()

    def step(self, num_backwards: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(num_backwards):
            out = self.model(torch.ones(4, 8))
            self.seen.append(("forward", out.dtype))
            out.register_hook(lambda grad: self.seen.append(("backward", torch.is_autocast_enabled("cpu"))))
            out.float().sum().backward()
        self.optimizer.step(lambda: self.seen.append(("optimizer", torch.is_autocast_enabled("cpu"))))


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def arm(job: Job) -> Iterator[Autocast]:
    arm = Autocast(Clock(), job.optimizer, device="cpu", dtype="bfloat16", suspicion=0.5)
    yield arm
    arm.end()


def weights(job: Job) -> list[Any]:
    state = job.optimizer.state.values()
    return [*map(torch.clone, job.model.parameters()), *(each["exp_avg"].clone() for each in state)]


def test_forward_is_narrow_and_backward_and_optimizer_run_outside(job: Job, arm: Autocast) -> None:
    arm.begin()
    for _ in range(2):
        job.step(1)
        arm.step_end()
    arm.end()
    assert job.seen == [("forward", torch.bfloat16), ("backward", False), ("optimizer", False)] * 2
    job.step(1)
    assert job.seen[-3] == ("forward", torch.float32)


def test_every_forward_of_an_accumulating_step_is_narrow(job: Job, arm: Autocast) -> None:
    arm.begin()
    job.step(3)
    arm.step_end()
    job.seen.clear()
    job.step(3)
    assert [dtype for what, dtype in job.seen if what == "forward"] == [torch.bfloat16] * 3
    assert job.seen[-1] == ("optimizer", False)


def test_cast_weights_follow_the_optimizer(job: Job, arm: Autocast) -> None:
    arm.begin()
    outputs = []
    for _ in range(2):
        outputs.append(job.model(torch.ones(4, 8)).float().sum().item())
        job.step(1)
        arm.step_end()
    assert outputs[0] != outputs[1]


def test_the_end_puts_parameters_and_optimizer_state_back(job: Job, arm: Autocast) -> None:
    before = weights(job)
    arm.begin()
    job.step(1)
    assert not torch.equal(next(job.model.parameters()), before[0])
    arm.end()
    assert all(map(torch.equal, weights(job), before))


def test_autocast_is_left_after_a_step_that_raised(job: Job, arm: Autocast) -> None:
    before = torch.autograd.backward
    arm.begin()
    with pytest.raises(RuntimeError, match="does not require grad"):
        job.model(torch.ones(4, 8)).detach().sum().backward()
    job.model(torch.ones(4, 8))
    arm.end()
    assert torch.autograd.backward is before
    assert not torch.is_autocast_enabled("cpu")


def test_half_precision_is_refused_where_parameters_cannot_be_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingState, "_fits", lambda self: False)
    arm = Autocast(Clock(), job.optimizer, device="cpu", dtype="float16", suspicion=0.5)
    arm.begin()
    assert arm.refusal is not None and "no room" in arm.refusal
    assert not torch.is_autocast_enabled("cpu")
    arm.step_end()
    arm.end()


def test_tf32_is_set_and_put_back() -> None:
    arm = Tf32(suspicion=0.5)
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    arm.begin()
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    arm.step_end()
    arm.end()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_tf32_gives_up_where_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(precision: str) -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    arm = Tf32(suspicion=0.5)
    arm.begin()
    assert arm.refusal is not None and "mix of the legacy" in arm.refusal


@pytest.mark.parametrize(
    ("native", "expected"), [(("_is_amx_tile_supported",), "bfloat16"), ((), None)], ids=["amx", "none"]
)
def test_a_cpu_needs_units_for_16_bits(
    native: tuple[str, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in native, raising=False)
    assert narrow_dtype("cpu") == expected


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), "bfloat16"), ((7, 5), "float16"), ((6, 1), None)]
)
def test_a_gpu_computes_in_the_format_of_its_generation(
    capability: tuple[int, int], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert narrow_dtype("cuda") == expected
