"""Gradient accumulation: four batches for one optimizer step; the loader is hidden in a generator.

It also changes its working folder, as Hydra does.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.chdir(sys.argv[1])


def batches():
    loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randn(640, 1)), batch_size=16)  # the loader
    while True:
        yield from loader


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for number, (inputs, targets) in enumerate(batches()):
    (nn.functional.mse_loss(model(inputs), targets) / 4).backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
