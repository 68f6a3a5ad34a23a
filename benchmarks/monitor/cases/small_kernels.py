"""A host that is too slow: a loop over the rows of a batch, and a loss that is asked for at every row."""

from __future__ import annotations

import torch
from common import DEVICE, for_seconds, seconds_to_train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS = 128, 64


def main() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(65536, WIDTH)), batch_size=ROWS)
    for (batch,) in for_seconds(loader, seconds_to_train()):
        total = 0.0
        optimizer.zero_grad()
        for row in batch.to(DEVICE):
            loss = model(row).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()


if __name__ == "__main__":
    main()
