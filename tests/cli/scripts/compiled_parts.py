"""A model of five parts, each compiled by itself; the backend counts how often it was asked to compile."""

import types

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_compiled = 0


def counting_backend(graph, _examples):
    global num_compiled
    num_compiled += 1
    return graph.forward


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, inputs):
        return torch.relu(self.linear(inputs))


def another_part():
    """A part of a class of its own: compiled code belongs to the code of a forward."""
    forward = types.FunctionType(Part.forward.__code__.replace(), globals())
    return type("Another", (Part,), {"forward": forward})()


torch.manual_seed(0)
model = nn.Sequential(*(another_part() for _ in range(5)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
parts = [torch.compile(part, backend=counting_backend) for part in model]
loader = DataLoader(TensorDataset(torch.randn(640, 32)), batch_size=16)
try:
    for _epoch in range(10_000):
        for (inputs,) in loader:
            for part in parts:
                inputs = part(inputs)
            optimizer.zero_grad()
            inputs.square().mean().backward()
            optimizer.step()
finally:
    print("compiled", num_compiled, "graphs")
