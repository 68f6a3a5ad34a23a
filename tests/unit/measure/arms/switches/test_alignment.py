from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from flatout.measure.arms.switches.alignment import PaddedProducts, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import Kernels
from flatout.measure.user_code import UserCode


class Seen:
    """The shapes of the weights that `linear` is given."""

    def __init__(self, monkeypatch: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        real = torch.nn.functional.linear

        def linear(rows: Any, weight: Any, bias: Any = None) -> Any:
            self.shapes.append(tuple(weight.shape))
            return real(rows, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", linear)


def test_odd_layers_are_padded_and_compute_the_same(monkeypatch: Any) -> None:
    seen = Seen(monkeypatch)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 70), torch.nn.Linear(70, 8))
    inputs = torch.randn(2, 3, 8)
    plain = model(inputs)
    plain.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    arm = PaddedProducts(UserCode(str(Path(__file__).parent)), Clock(), suspicion=0.3)
    arm.begin()
    padded, line = model(inputs), sys._getframe().f_lineno
    padded.square().sum().backward()
    arm.step_end()
    arm.end()
    assert seen.shapes[3:] == [(64, 64), (128, 64), (64, 128)]
    assert torch.allclose(padded, plain, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)
    assert (arm.place.line, arm.value, arm.refusal) == (line, "70 x 12", None)
    model(inputs)
    assert seen.shapes[6:] == [(12, 8), (70, 12), (8, 70)]


def test_even_layers_stay_and_refuse_the_arm(monkeypatch: Any) -> None:
    seen = Seen(monkeypatch)
    arm = PaddedProducts(UserCode(str(Path(__file__).parent)), Clock(), suspicion=0.3)
    arm.begin()
    torch.nn.Linear(8, 16)(torch.randn(2, 8))
    arm.step_end()
    arm.end()
    assert seen.shapes == [(16, 8)]
    assert arm.refusal is not None


def kernels(seconds: float, dtype: str = "bf16") -> Kernels:
    return Kernels(
        num_steps=1,
        step_s=1.0,
        busy_share=0.9,
        num_kernels=9.0,
        median_kernel_s=None,
        gap_s=None,
        sync_gap_s=None,
        num_syncs=None,
        by_category_s={},
        matmul_s_by_dtype={dtype: seconds},
        top=(),
    )


def test_it_is_proposed_for_odd_weights_on_tensor_cores(context: Any) -> None:
    odd = torch.optim.SGD(torch.nn.Linear(64, 257, bias=False).parameters())
    even = torch.optim.SGD(torch.nn.Linear(64, 256).parameters())
    able = {"device": "cuda", "optimizers": (odd,)}
    (arm,) = propose(context(kernels=kernels(0.5), **able))
    assert arm.suspicion == 0.25
    assert not list(propose(context(kernels=kernels(0.05), **able)))
    assert not list(propose(context(kernels=kernels(0.5, "fp32"), **able)))
    assert not list(propose(context(kernels=kernels(0.5), device="cpu", optimizers=(odd,))))
    assert not list(propose(context(kernels=kernels(0.5), device="cuda", optimizers=(even,))))
