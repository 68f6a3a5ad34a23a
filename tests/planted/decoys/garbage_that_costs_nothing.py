"""A collection every two hundred steps, as one is told to make: the other steps never pause."""

import gc

import torch
from torch import nn


def main():
    torch.manual_seed(24)
    model = nn.Sequential(
        nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 128)
    gc.collect()
    gc.freeze()
    gc.disable()
    for step in range(50_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            gc.collect()  # decoy: garbage-collector-pauses
            print(step, loss.item())


if __name__ == "__main__":
    main()
