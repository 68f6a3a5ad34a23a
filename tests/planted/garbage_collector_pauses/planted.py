"""Fit a network while a table of words lies in Python lists, and collect garbage after each step."""

import gc

import torch
from torch import nn


def main():
    torch.manual_seed(8)
    words = [{"word": str(number), "parents": [number // 2]} for number in range(20_000)]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 64)
    for step in range(20_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gc.collect()  # guilty
        if step % 500 == 0:
            print(step, loss.item(), len(words))


if __name__ == "__main__":
    main()
