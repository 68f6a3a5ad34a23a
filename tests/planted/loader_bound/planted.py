"""Classify readings that are fetched from a slow store, a batch at a time, by a single worker."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH_S = 0.012  # what the store takes to answer


class Store(Dataset):
    """A dataset that is asked for whole batches."""

    def __init__(self, number=32768):
        self.readings = torch.randn(number, 32)

    def __len__(self):
        return len(self.readings)

    def __getitems__(self, indices):
        time.sleep(BATCH_S)  # also: slow-samples
        return self.readings[indices]


def main():
    torch.manual_seed(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(  # guilty
        Store(), batch_size=128, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=lambda x: x
    )
    model = nn.Sequential(
        nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(1000):
        for readings in loader:
            optimizer.zero_grad()
            model(readings.to(device)).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
