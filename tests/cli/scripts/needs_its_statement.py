"""A loop that spends its time between the phases, and raises when that statement does not run."""

import torch
from torch import nn


def spend(step):
    total = 0
    for number in range(20_000):
        total += number % 7
    return step + 0 * total


def main():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(16, 8)
    for step in range(100_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent = spend(step)
        if spent != step:
            raise RuntimeError("the statement did not run")


main()
