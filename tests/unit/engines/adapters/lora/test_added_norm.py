"""One norm for two readers against plain operators; the kernels themselves are in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.added_norm import NormKernels, added_norm, fused


def forward(branch: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    total = branch + residual
    return total, *torch.native_layer_norm(total, (total.shape[1],), weight, bias, eps)


def backward(
    first: Tensor, second: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> Tensor:
    whole = first if second is None else first + second
    mask = [True, False, False]
    shape = (total.shape[1],)
    return torch.ops.aten.native_layer_norm_backward(whole, total, shape, mean, rstd, weight, None, mask)[0]


@pytest.mark.parametrize("readers", [(1.0, 2.0), (1.0, 0.0), (0.0, 3.0)])
def test_the_gradients_of_both_readers_arrive(readers: tuple[float, float]) -> None:
    norm = nn.LayerNorm(8).requires_grad_(False)
    nn.init.normal_(norm.weight)
    plain = NormKernels(forward, backward)  # type: ignore[arg-type]
    found = []
    for together in (True, False):
        torch.manual_seed(0)
        branch, residual = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
        pair = fused(norm, branch, residual, plain) if together else added_norm(norm, branch, residual)
        powers = zip(readers, pair, (2, 3), strict=True)
        used = [share * normed.pow(power).sum() for share, normed, power in powers if share]
        torch.stack(used).sum().backward()
        found.append((*pair, branch.grad, residual.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[0][2] is not None and found[0][2].any()
