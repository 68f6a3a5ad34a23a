"""Short epochs, each of which begins with an order that is drawn in Python, sample by sample."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Weighted(Sampler):
    """Samples in the order of a random number of each, so that the likely ones come first."""

    def __init__(self, number, chosen):
        self.weights = [1 + index % 7 for index in range(number)]
        self.chosen = chosen

    def __iter__(self):
        numbers = [random.random() ** weight for weight in self.weights]  # also: epoch-start-stall
        drawn = list(zip(numbers, range(len(numbers)), strict=True))  # also: epoch-start-stall
        drawn.sort()  # also: epoch-start-stall
        return iter([index for _, index in drawn[: self.chosen]])  # also: epoch-start-stall

    def __len__(self):
        return self.chosen


def main():
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(60_000, 16))
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = Weighted(len(rows), chosen=640)
    loader = DataLoader(rows, batch_size=64, sampler=sampler)  # also: single-process-loading, rows-one-by-one-from-memory  # fmt: skip
    for _epoch in range(2000):
        for (batch,) in loader:  # guilty
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
