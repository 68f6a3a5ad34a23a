"""Fit a small classifier with short epochs whose workers stay."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Signals(Dataset):
    def __init__(self, length=512):
        self.rng = np.random.default_rng(1)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        phase = np.linspace(0, 6.28 * (1 + i % 7), 512, dtype=np.float32)  # also: slow-samples
        return np.sin(phase + i).astype(np.float32), i % 7  # also: slow-samples


def train(num_epochs=2000):
    model = nn.Sequential(nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 7))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    loader = DataLoader(Signals(), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)  # also: loader-bound  # fmt: skip
    best = float("inf")
    for epoch in range(num_epochs):
        total = torch.zeros((), device=device)
        for signals, labels in loader:  # also: epoch-start-stall
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(signals.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if epoch % 20 == 0 and total.item() < best:
            best = total.item()
            print("epoch", epoch, "best", best)


if __name__ == "__main__":
    train()
