"""Classify readings that are fetched from a slow store, a batch at a time, by as many workers as it takes."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_S = 0.012 if DEVICE == "cuda" else 0.06  # what the store takes to answer
WIDTH = 512 if DEVICE == "cuda" else 1024  # of steps beside which handing a batch over is little


class Store(Dataset):
    """A dataset that is asked for whole batches."""

    def __init__(self, number=32768):
        self.readings = torch.randn(number, 32)

    def __len__(self):
        return len(self.readings)

    def __getitems__(self, indices):
        time.sleep(BATCH_S)
        return self.readings[indices]


def main():
    torch.manual_seed(2)
    loader = DataLoader(
        Store(),
        batch_size=256,
        shuffle=True,
        num_workers=24 if DEVICE == "cuda" else 6,
        persistent_workers=True,
        collate_fn=lambda x: x,
    )
    model = nn.Sequential(
        nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(1000):
        for readings in loader:
            optimizer.zero_grad()
            model(readings.to(DEVICE)).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
