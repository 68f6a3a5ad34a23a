"""Train a compiled network and time its step from outside."""

import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(7)
inputs = torch.randn(4096, 128, device=device)
model = nn.Sequential(*(Block(128) for _ in range(4))).to(device)
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(4000):
    start = time.perf_counter()
    chosen = torch.randint(0, len(inputs), (512,), device=device)
    loss = nn.functional.mse_loss(compiled(inputs[chosen]), inputs[chosen])  # also: launch-bound-step on cuda  # also: compile-not-amortised  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item(), time.perf_counter() - start)
