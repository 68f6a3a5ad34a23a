"""Averages over all parameters are those over each; or a reason."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.foreach_average import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

HEAD = """
import torch
@torch.no_grad()
def update(ema, model, decay):
    for p, q in zip(ema.parameters(), model.parameters()):
        """
WAYS = (
    "p.data.mul_(decay).add_(q.data, alpha=1 - decay)",
    "p.mul_(decay).add_((1 - decay) * q.detach())",
    "p.lerp_(q, 1 - decay)",
    "p.copy_(decay * p.data + q.data * (1 - decay))",
    "p.data.copy_(q.data)",
    "p.mul_(decay).add_(q, alpha=0.5 - decay)",
    "p.copy_((1.0 - decay) * p + decay * q)",
)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_same(way: str) -> None:
    text = f"{HEAD}{way}\n"
    new = rewrite(PATCH, text)
    assert "torch._foreach_" in new and "for p, q" not in new
    found = []
    for module in (compiled(text), compiled(new)):
        torch.manual_seed(0)
        ema, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        module.update(ema, model, 0.9)
        found.append([each.detach() for each in ema.parameters()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("way", "calls"), list(zip(WAYS, (1, 1, 1, 1, 1, 2, 1), strict=True)))
def test_shares_that_add_up_to_one_take_one_call(way: str, calls: int) -> None:
    assert rewrite(PATCH, f"{HEAD}{way}\n").count("torch._foreach_") == calls


@pytest.mark.parametrize(
    "way",
    [
        "p.add_(q)",
        "p.mul_(q).add_(q)",
        "p.data = q.data",
        "p.copy_(q + p * q)",
        "p.mul_(f()).add_(q)",
        "p.sub_(q)",
    ],
)
def test_other_updates_are_refused(way: str) -> None:
    with pytest.raises(Refused):
        PATCH.rewrite(SourceFile(f"{HEAD}{way}\n"), ())
