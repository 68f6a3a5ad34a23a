"""What modules, containers and states hold is found once at each place."""

from __future__ import annotations

import torch
from torch import nn

from flatout.memory.jobs.held_tensors import fresh_tensor, held_tensors


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.seen = [torch.zeros(4), {"again": self.layer.weight}]
        self.itself = [self]


def test_registered_tensors_attributes_and_lists_are_found() -> None:
    model = Remembering()
    found = dict(held_tensors(model))
    assert sorted(tensor.numel() for tensor in found.values()) == [2, 3, 4, 4, 4]
    assert found["seen", 1, "again"] is model.layer.weight
    assert found["_buffers", "mean"] is model.mean


def test_state_is_found_by_parameter_and_gradients_are_not() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    places = {place for place, _ in held_tensors(vars(optimizer))}
    assert ("state", id(parameter), "exp_avg") in places
    assert all(tensor is not parameter.grad for _, tensor in held_tensors(vars(optimizer)))


def test_a_copy_has_the_values_and_kind_of_its_original() -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    made = fresh_tensor(parameter)
    assert isinstance(made, nn.Parameter)
    assert not made.requires_grad
    assert made.data_ptr() != parameter.data_ptr()
    assert torch.equal(made, parameter)
