from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.measure.arms import precision
from flatout.measure.arms.arm import COMPILED
from flatout.measure.arms.precision import Autocast, Tf32, TrainingState, narrow_dtype, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import Kernels, ModuleCall, Place


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


def test_a_loss_of_probabilities_stays_in_32_bits(job: Job, arm: Autocast) -> None:
    before = torch.nn.functional.binary_cross_entropy
    arm.begin()
    out = torch.sigmoid(job.model(torch.ones(4, 8)))
    loss = torch.nn.BCELoss()(out, torch.ones(4, 8))
    assert out.dtype == torch.bfloat16 and loss.dtype == torch.float32
    arm.end()
    assert torch.nn.functional.binary_cross_entropy is before


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


def kernels(products: dict[str, float], **changes: Any) -> Kernels:
    figures = {"busy_share": 0.9, "by_category_s": {}, "matmul_s_by_dtype": products, **changes}
    return Kernels(
        num_steps=1,
        step_s=1.0,
        num_kernels=9,
        median_kernel_s=1e-5,
        gap_s=0.0,
        sync_gap_s=0.0,
        num_syncs=0,
        top=(),
        **figures,
    )


def call(autocast: str | None = None) -> ModuleCall:
    place = Place(file="train.py", line=7)
    return ModuleCall(
        module="Model",
        place=place,
        calls_per_step=1,
        rows=8,
        training=True,
        has_parameters=True,
        autocast=autocast,
    )


@pytest.fixture
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(precision, "has_compiled", lambda: False)


@pytest.mark.usefixtures("_h200")
def test_products_of_32_bits_are_proposed_in_narrower_formats(context: Any, job: Job) -> None:
    found = {"device": "cuda", "optimizer": job.optimizer, "module_calls": (call(),)}
    arms = {arm.label: arm for arm in propose(context(kernels=kernels({"fp32": 0.5}), **found))}
    assert {label: arm.suspicion for label, arm in arms.items()} == {"autocast": 0.45, "tf32": 0.25}
    assert {arm.place for arm in arms.values()} == {Place(file="train.py", line=7)}
    arms = {arm.label: arm for arm in propose(context(kernels=kernels({"tf32": 0.5}), **found))}
    assert list(arms) == ["autocast"]


@pytest.mark.usefixtures("_h200")
def test_formats_that_change_nothing_are_not_proposed(context: Any, job: Job) -> None:
    found: dict[str, Any] = {"device": "cuda", "optimizer": job.optimizer, "kernels": kernels({"fp32": 0.5})}
    assert not list(propose(context(**{**found, "kernels": kernels({"fp32": 0.05})})))
    assert not list(propose(context(**found, module_calls=(call("bfloat16"),))))
    job.model.bfloat16()
    assert not list(propose(context(**found)))


@pytest.mark.usefixtures("_h200")
def test_compiled_code_is_refused(context: Any, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_compiled", lambda: True)
    arms = list(propose(context(device="cuda", optimizer=job.optimizer, kernels=kernels({"fp32": 0.5}))))
    assert [arm.refusal for arm in arms] == [COMPILED, COMPILED]


@pytest.mark.parametrize(("native", "proposed"), [("bfloat16", ["autocast"]), (None, [])])
def test_a_cpu_is_judged_by_its_operators(
    context: Any, job: Job, monkeypatch: pytest.MonkeyPatch, native: str | None, proposed: list[str]
) -> None:
    monkeypatch.setattr(precision, "narrow_dtype", lambda device: native)
    operators = kernels({}, busy_share=None, by_category_s={"matmul": 0.6})
    arms = list(propose(context(optimizer=job.optimizer, kernels=operators)))
    assert [arm.label for arm in arms] == proposed
