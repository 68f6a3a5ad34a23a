"""Steps that run compiled functions as they are written: what does torch.compile gain?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.phases import has_compiled


class Uncompiled(Arm):
    """Compiled functions run by Python."""

    kind = label = "uncompiled"
    suspicion = 0.15
    fewest_rounds = 2

    def __init__(self) -> None:
        self._stance: Any = None

    def begin(self) -> None:
        import torch
        from torch._dynamo import eval_frame

        self._stance = eval_frame._stance.stance
        torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        import torch

        if self._stance is not None:
            torch.compiler.set_stance(self._stance)
            self._stance = None


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if anything was compiled."""
    if has_compiled():
        yield Uncompiled()
