"""Classify recordings whose channels are arrays of their own, joined by torch."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    def __init__(self, number=512, channels=16, length=128):
        numbers = np.random.default_rng(14)
        shape = (number, channels, length)
        self.channels = [list(recording) for recording in numbers.standard_normal(shape, dtype=np.float32)]

    def __len__(self):
        return len(self.channels)

    def __getitem__(self, index):
        return torch.tensor(self.channels[index])  # guilty, largest


def main():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2048, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recordings = Recordings()
    loader = DataLoader(recordings, batch_size=32, shuffle=True)  # also: single-process-loading, loader-bound, largest  # fmt: skip
    for epoch in range(2000):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
