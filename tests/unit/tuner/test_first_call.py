from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.patches import Patches
from flatout.tuner.first_call import on_first_call


def test_each_trained_model_is_met_once_and_its_parts_are_not() -> None:
    met: list[Any] = []
    patches = Patches()
    on_first_call(patches, met.append)
    model, other, frozen = (
        nn.Sequential(nn.Linear(2, 2)),
        nn.Linear(2, 2),
        nn.Linear(2, 2).requires_grad_(False),
    )
    x = torch.ones(1, 2)
    for _ in range(2):
        model(x), other(x), frozen(x)
    patches.undo()
    nn.Linear(2, 2)(x)
    assert met == [model, other]


def test_what_a_model_is_called_with_can_be_changed_from_the_first_call_on() -> None:
    patches = Patches()
    on_first_call(
        patches, lambda module: module.double(), change=lambda inputs: ((inputs[0][0].double(),), {})
    )
    assert nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2)).dtype == torch.float64
    patches.undo()


def test_a_call_that_raises_is_left_behind() -> None:
    met: list[Any] = []
    patches = Patches()
    on_first_call(patches, met.append)
    broken, model = nn.Linear(3, 2), nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        broken(torch.ones(1, 2))
    model(torch.ones(1, 2))
    patches.undo()
    assert met == [broken, model]
