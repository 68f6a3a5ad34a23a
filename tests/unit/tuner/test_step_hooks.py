from __future__ import annotations

import torch
from torch import nn

from flatout.measure.patches import Patches
from flatout.tuner.step_hooks import around_steps


def test_calls_may_come_and_go_while_a_step_is_under_way() -> None:
    seen: list[str] = []
    outer, inner = Patches(), Patches()
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    def turn(_optimizer: object) -> None:
        seen.append("after")
        if len(seen) == 1:
            around_steps(
                inner, before=lambda _: seen.append("inner before"), after=lambda _: seen.append("inner")
            )
        else:
            inner.undo()

    around_steps(outer, after=turn)
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        outer.undo()
    optimizer.step()
    # the second step's calls were listed before it took the inner ones away
    assert seen == ["after", "inner before", "after", "inner", "after"]
