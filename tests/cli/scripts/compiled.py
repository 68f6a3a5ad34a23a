"""A compiled model; the backend counts how often it was asked to compile."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_compiled = 0


def counting_backend(graph, _examples):
    global num_compiled
    num_compiled += 1
    return graph.forward


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, inputs):
        hidden = self.linear(inputs)
        return torch.stack([hidden[row] for row in range(len(hidden))]).mean(1)  # row by row


torch.manual_seed(0)
model = Rows()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
compiled = torch.compile(model, backend=counting_backend)
loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randn(640)), batch_size=16)
try:
    for _epoch in range(10_000):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(compiled(inputs), targets[: len(inputs)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
finally:
    print("compiled", num_compiled, "graphs")
