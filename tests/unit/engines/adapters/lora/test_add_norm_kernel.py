"""The kernels of residual add and norm are the plain operators, for one reader and for two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.engines.adapters.lora.encoder_layers import NormKernels, add_and_norm, added_norm
from tests.support.kernels import DEVICE, Numbers, needs_device

pytestmark = needs_device


@pytest.mark.parametrize("width", [48, 384, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readers", [(1.0, 2.0), (1.0, 0.0)])
def test_states_and_gradients(width: int, dtype: torch.dtype, readers: tuple[float, float]) -> None:
    from flatout.engines.adapters.lora import add_norm_kernel

    norm = nn.LayerNorm(width, device=DEVICE, dtype=dtype).requires_grad_(False)
    numbers = Numbers()
    norm.weight.copy_(numbers.normal(width))
    norm.bias.copy_(numbers.normal(width))
    weights = numbers.normal(9, width)
    branch, residual = (numbers.normal(9, width, dtype=dtype) for _ in range(2))
    found = []
    for kernels in (NormKernels(add_norm_kernel.forward, add_norm_kernel.backward), None):
        given = [one.clone().requires_grad_() for one in (branch, residual)]
        pair = added_norm(norm, *given) if kernels is None else add_and_norm(norm, *given, kernels)
        used = [share * (y.float() * weights).sum() for share, y in zip(readers, pair, strict=True) if share]
        torch.stack(used).sum().backward()
        found.append((pair[0], *(one.grad for one in given)))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert found[0][1] is not None and found[0][1].any()
