from __future__ import annotations

import torch
from torch import nn

from flatout.measure.arms.knock_out.lost_gradients import keep_gradients
from flatout.measure.patches import Patches


def test_parameters_without_a_gradient_get_zeros_until_undone() -> None:
    used, lost, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([used, lost, frozen], lr=0.1)
    (used * lost).sum().backward()
    patches = Patches()
    keep_gradients([optimizer], patches)
    for _ in range(2):
        optimizer.zero_grad()
        (used * 2).sum().backward()
        assert used.grad is not None and used.grad.tolist() == [2.0, 2.0]
        assert lost.grad is not None and lost.grad.tolist() == [0.0, 0.0]
        assert frozen.grad is None  # it had none before
    patches.undo()
    optimizer.zero_grad()
    (used * 2).sum().backward()
    assert lost.grad is None
