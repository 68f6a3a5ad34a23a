"""Fit a network of two heads, one of which is forgotten."""

import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.first, self.second = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x):  # guilty
        x = self.trunk(x)
        return torch.cat([self.first(x), self.first(x)], dim=1)


def main():
    torch.manual_seed(12)
    inputs, targets = torch.randn(512, 128), torch.randn(512, 2)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(50_000):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
