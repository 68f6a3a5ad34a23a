"""Fit a network to the logarithm of counts, one added to each."""

import torch
from torch import nn


def main():
    torch.manual_seed(11)
    inputs, counts = torch.randn(512, 128), torch.randint(0, 9, (512,))
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(50_000):
        loss = (model(inputs).squeeze(1) - counts.float().log1p()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
