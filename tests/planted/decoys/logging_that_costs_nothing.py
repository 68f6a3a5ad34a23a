"""A line that is printed in every step of several milliseconds: some microseconds of it."""

import torch
from torch import nn


def main():
    torch.manual_seed(25)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(512, 256)
    for step in range(50_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())  # decoy: logging-every-step


if __name__ == "__main__":
    main()
