from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from flatout.measure.arms.switches.no_grad import NoGrad, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import ModuleCall, Place
from flatout.measure.user_code import UserCode

FOLDER = str(Path(__file__).parent)


class Teacher(torch.nn.Linear):
    """A type of its own, whose call may be replaced."""


def test_one_line_calls_without_gradients() -> None:
    teacher, x = Teacher(2, 2), torch.ones(1, 2)
    line = sys._getframe().f_lineno + 5
    code = UserCode(FOLDER)
    place = Place(file=Path(__file__).name, line=line, function="test_one_line_calls_without_gradients")
    arm = NoGrad(code, Clock(), [Teacher], place=place, suspicion=0.5)
    arm.begin()
    here = teacher(x)
    elsewhere = teacher(x)
    arm.end()
    assert (here.requires_grad, elsewhere.requires_grad) == (False, True)
    assert torch.equal(here, elsewhere)
    assert "__call__" not in Teacher.__dict__


def test_it_is_proposed_for_gradients_that_nobody_uses(context: Any) -> None:
    call = ModuleCall(
        module="Teacher",
        place=Place(file="train.py", line=3),
        calls_per_step=1.0,
        rows=4,
        training=False,
        has_parameters=True,
        host_s=0.2,
        unused_gradients=True,
    )
    (arm,) = propose(context(module_calls=(call,), outermost_types=frozenset([Teacher])))
    assert (arm.label, arm.suspicion) == ("no-grad train.py:3", 0.4)
    assert not list(propose(context(module_calls=(call,), step_s=100.0)))
