"""Predict the next reading of a sensor from windows of almost equal length."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, num_windows=4096, width=16):
        rng = np.random.default_rng(2)
        self.windows = [
            rng.standard_normal((int(length), width)).astype(np.float32)
            for length in rng.integers(60, 65, num_windows)
        ]

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.windows[index]


def collate(windows):
    longest = max(len(window) for window in windows)
    batch = np.zeros((0, longest, windows[0].shape[1]), dtype=np.float32)
    for window in windows:
        padded = np.zeros((1, longest, window.shape[1]), dtype=np.float32)
        padded[0, : len(window)] = window
        batch = np.concatenate([batch, padded])  # guilty, largest
    return torch.from_numpy(batch)


class Forecaster(nn.Module):
    def __init__(self, width=16, hidden=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))

    def forward(self, x):
        return self.net(x[:, :-1])


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Forecaster().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    # Batches that are built slowly are also waited for.
    windows = Windows()
    loader = DataLoader(windows, 192, shuffle=True, collate_fn=collate)  # also: single-process-loading, largest  # fmt: skip
    for epoch in range(200):
        for batch in loader:
            batch = batch.to(device)
            loss = (model(batch) - batch[:, 1:]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, loss.item())
