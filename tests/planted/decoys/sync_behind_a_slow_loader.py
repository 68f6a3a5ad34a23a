"""A loss that is read in every step of a job that waits for its data anyway."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Store(Dataset):
    """A dataset that is asked for whole batches, and waits for storage."""

    def __init__(self, number=32768):
        self.readings = torch.randn(number, 32)

    def __len__(self):
        return len(self.readings)

    def __getitems__(self, indices):
        time.sleep(0.02)  # also: slow-samples
        return self.readings[indices]


def main():
    torch.manual_seed(23)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(  # guilty: loader-bound
        Store(), batch_size=128, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=lambda x: x
    )
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0.0
    for _epoch in range(1000):
        for readings in loader:
            loss = model(readings.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()  # decoy: sync-in-step
    print(total)


if __name__ == "__main__":
    main()
